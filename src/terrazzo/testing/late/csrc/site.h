// Where in a program an operation was called: lines of Python, or the node of a backward and the lines of its forward.
#pragma once

#include <Python.h>

#include <memory>
#include <string>
#include <vector>

namespace late {

struct Frame {
  PyCodeObject* code;  // never freed: see site.cpp
  int instruction;
};

struct Site {
  std::vector<Frame> frames;  // the innermost first, without those of torch and of this device
  std::string node;           // the backward node that runs, if one does
};

using SitePtr = std::shared_ptr<const Site>;

// Takes the GIL for a moment: the caller may hold no lock that another thread needs while it has the GIL.
SitePtr current_site();
// "train.py:31 in step"; needs the GIL.
std::vector<std::string> lines_of(const Site&);

}  // namespace late
