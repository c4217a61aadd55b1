// The fused cells of recurrent layers, and dropout: torch chooses these operators for accelerators, and the CPU has no
// kernels for them. They are made of the device's own operations.
#include "operators.h"

#include <ATen/ATen.h>
#include <torch/library.h>

namespace late {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const Optional& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor or_zeros(const Optional& gradient, const Tensor& like) { return gradient && gradient->defined() ? *gradient : at::zeros_like(like); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cx,
    const Optional& input_bias, const Optional& hidden_bias) {
  auto gates = (plus(input_gates, input_bias) + plus(hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  auto cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Optional& grad_hy, const Optional& grad_cy, const Tensor& cx,
    const Tensor& cy, const Tensor& workspace, bool has_bias) {
  if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
  auto gates = workspace.chunk(4, 1);
  auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  auto tanh_cy = cy.tanh(), hy = or_zeros(grad_hy, cx);
  auto of_cell = hy * out * (1 - tanh_cy * tanh_cy) + or_zeros(grad_cy, cx);
  auto of_gates = at::cat({of_cell * cell * in * (1 - in), of_cell * cx * forget * (1 - forget), of_cell * in * (1 - cell * cell),
                              hy * tanh_cy * out * (1 - out)}, 1);
  return {of_gates, of_cell * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hx,
    const Optional& input_bias, const Optional& hidden_bias) {
  auto in = plus(input_gates, input_bias).chunk(3, 1), hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  auto next = (in[2] + reset * hidden[2]).tanh();
  return {(hx - next) * update + next, at::cat({reset, update, next, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  auto saved = workspace.chunk(5, 1);
  auto &reset = saved[0], &update = saved[1], &next = saved[2], &hx = saved[3], &hidden = saved[4];
  auto of_next = grad_hy * (1 - update) * (1 - next * next);
  auto of_update = grad_hy * (hx - next) * update * (1 - update);
  auto of_reset = of_next * hidden * reset * (1 - reset);
  auto of_in = at::cat({of_reset, of_update, of_next}, 1), of_hidden = at::cat({of_reset, of_update, of_next * reset}, 1);
  return {of_in, of_hidden, grad_hy * update, has_bias ? of_in.sum(0) : Tensor(), has_bias ? of_hidden.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0. : 1 / (1 - p)), mask};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("native_dropout", native_dropout);
}

}  // namespace late
