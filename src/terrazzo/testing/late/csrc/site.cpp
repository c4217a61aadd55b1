#include "site.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <mutex>
#include <unordered_map>

namespace late {
namespace {

constexpr size_t kKept = 10;    // frames of a site
constexpr int kVisited = 200;   // frames that are looked at: a module's call has three of torch's
constexpr size_t kNodes = 1 << 15;

// Which code objects are the user's. They are kept for ever, so that sites can be copied and freed without the GIL.
bool is_users(PyCodeObject* code) {
  static std::unordered_map<PyCodeObject*, bool> known;  // guarded by the GIL
  auto found = known.find(code);
  if (found != known.end()) return found->second;
  Py_INCREF(code);
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  if (!name) PyErr_Clear();
  std::string file = name ? name : "";
  bool users = file.find("/torch/") == std::string::npos && file.find("terrazzo/testing/late/") == std::string::npos &&
      file.find("contextlib.py") == std::string::npos && file.find("<frozen") == std::string::npos;
  return known[code] = users;
}

// Backward nodes run in threads without Python frames. A node is created by the forward operation, just before its kernel
// is called, and numbered; the newest sites are kept by that number.
struct Remembered {
  uint64_t thread = 0, number = 0;
  SitePtr site;
};
std::mutex nodes_lock;
std::array<Remembered, kNodes> nodes;

void remember(const SitePtr& site) {
  uint64_t next = at::sequence_number::peek();
  if (next == 0) return;
  std::lock_guard<std::mutex> lock(nodes_lock);
  nodes[(next - 1) % kNodes] = {at::RecordFunction::currentThreadId(), next - 1, site};
}

SitePtr forward_of(const torch::autograd::Node& node) {
  std::lock_guard<std::mutex> lock(nodes_lock);
  auto& found = nodes[node.sequence_nr() % kNodes];
  return found.number == node.sequence_nr() && found.thread == node.thread_id() ? found.site : nullptr;
}

}  // namespace

SitePtr current_site() {
  auto site = std::make_shared<Site>();
  if (!Py_IsInitialized()) return site;
  auto node = torch::autograd::get_current_node();
  PyGILState_STATE gil = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  for (int n = 0; frame && n < kVisited && site->frames.size() < kKept; n++) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (is_users(code)) site->frames.push_back({code, PyFrame_GetLasti(frame)});
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  PyGILState_Release(gil);
  if (node) {
    site->node = node->name();
    if (site->frames.empty())
      if (auto forward = forward_of(*node)) site->frames = forward->frames;
  } else {
    remember(site);
  }
  return site;
}

std::vector<std::string> lines_of(const Site& site) {
  std::vector<std::string> lines;
  if (!site.node.empty()) lines.push_back("backward: " + site.node);
  for (auto& frame : site.frames) {
    auto text = [](PyObject* name) {
      const char* chars = PyUnicode_AsUTF8(name);
      if (!chars) PyErr_Clear();
      return std::string(chars ? chars : "?");
    };
    lines.push_back(text(frame.code->co_filename) + ":" + std::to_string(PyCode_Addr2Line(frame.code, frame.instruction)) +
                    " in " + text(frame.code->co_name));
  }
  return lines;
}

}  // namespace late
