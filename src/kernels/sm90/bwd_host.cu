// SPDX-License-Identifier: Apache-2.0
#include "core/words.h"
#include "kernels/any/bwd_delta.h"
#include "kernels/sm90/bwd_host.h"
#include "kernels/sm90/tensor_maps.h"

namespace ffpa::sm90 {

std::string backward_refuses(const Problem& p) {
  if (!is_hopper(p.fwd().q.device_index))
    return words("q: must lie on a GPU of compute capability 9.0, but device ", p.fwd().q.device_index, " is not one");
  return tensor_maps_refuse(p);
}

BackwardWorkspace backward_workspace(const Problem& p) {
  const auto round = [](uint64_t bytes) { return (bytes + 255) / 256 * 256; };
  const auto rows = static_cast<uint64_t>(bwd_delta::rows(p));
  BackwardWorkspace w;
  w.delta = round(rows * 4);
  w.dout = 2 * w.delta;
  w.copies_dout = !tensor_map_refuses("dout", p.args.dout, ragged_q(p)).empty();
  w.bytes = w.dout + (w.copies_dout ? round(rows * static_cast<uint64_t>((p.d_v + 7) / 8 * 8) * 2) : 0);
  return w;
}

Problem with_readable_dout(const Problem& p, void* workspace) {
  Problem readable = p;
  const BackwardWorkspace w = backward_workspace(p);
  if (!w.copies_dout) return readable;
  ffpa_tensor& t = readable.args.dout;
  t.data = static_cast<char*>(workspace) + w.dout;
  t.stride[3] = 1;
  t.stride[2] = (p.d_v + 7) / 8 * 8;
  for (int axis = 1; axis >= 0; --axis) t.stride[axis] = t.stride[axis + 1] * t.extent[axis + 1];
  return readable;
}

void fill_backward_params(const Problem& p, void* workspace, attn::BackwardParams* b) {
  fill_tma_params(p, b);
  const ffpa_tensor &q = p.fwd().q, &dout = p.args.dout;
  b->q_ragged = ragged_q(p);
  b->q_batch_rows = map_batch_rows(q);
  b->dout_batch_rows = map_batch_rows(dout);
  b->dout_head_step = map_step(dout, 1);
  b->dout_batch_step = map_step(dout, 0);
  const BackwardWorkspace w = backward_workspace(p);
  const auto row_values = [&](uint64_t offset) {
    return attn::RowValues{reinterpret_cast<float*>(static_cast<char*>(workspace) + offset), q.extent[1] * q.extent[2],
                           q.extent[2], 1};
  };
  b->lse_log2 = row_values(w.lse_log2);
  b->delta = row_values(w.delta);
  b->dq = rows_out(p.args.dq);
  b->dk = rows_out(p.args.dk);
  b->dv = rows_out(p.args.dv);
  b->scale = static_cast<float>(p.scale);
}

Status fill_backward_maps(const Problem& p, const BackwardBoxes& boxes, attn::BackwardParams* b) {
  const ffpa_forward_problem& f = p.fwd();
  const auto encode = [](CUtensorMap* map, const ffpa_tensor& t, bool ragged, int box_rows) {
    return !has_elements(t) || encode_sequences(map, t, ragged, box_rows);
  };
  if (encode(&b->q, f.q, b->q_ragged, boxes.q_rows) && encode(&b->k, f.k, b->ragged, boxes.k_rows) &&
      encode(&b->v, f.v, b->ragged, boxes.v_rows) && encode(&b->dout, p.args.dout, b->q_ragged, boxes.dout_rows))
    return {};
  return {FFPA_DEVICE_ERROR, "cuTensorMapEncodeTiled: refused q, k, v or dout"};
}

}  // namespace ffpa::sm90
