// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/words.h"
#include "kernels/sm90/fwd_host.h"
#include "kernels/sm90/tensor_maps.h"

namespace ffpa::sm90 {

std::string forward_refuses(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  if (!is_hopper(f.q.device_index))
    return words("q: must lie on a GPU of compute capability 9.0, but device ", f.q.device_index, " is not one");
  if (std::string reason = tensor_maps_refuse(p); !reason.empty()) return reason;
  if (f.num_splits > 1) return words("num_splits: must be 0 or 1, but is ", f.num_splits);
  return {};
}

bool nothing_to_write(const Problem& p) {
  const ffpa_tensor& o = p.fwd().o;
  return o.extent[0] * o.extent[1] * o.extent[2] * o.extent[3] == 0;
}

Status fill_forward_params(const Problem& p, const Boxes& boxes, attn::ForwardParams* f) {
  const ffpa_forward_problem& a = p.fwd();
  fill_attention_params(p, f);
  const bool has_keys = a.k.extent[0] > 0 && a.k.extent[2] > 0;  // without, no copy is made
  if (has_keys && !(encode_rows(&f->q, a.q, boxes.q_rows) && encode_sequences(&f->k, a.k, f->ragged, boxes.k_rows) &&
                    encode_sequences(&f->v, a.v, f->ragged, boxes.v_rows)))
    return {FFPA_DEVICE_ERROR, "cuTensorMapEncodeTiled: refused q, k or v"};
  f->o = rows_out(a.o);
  if (present(a.lse)) f->lse = {static_cast<float*>(a.lse.data), a.lse.stride[0], a.lse.stride[1], a.lse.stride[2]};
  const int64_t row_tiles = a.q.extent[2] / boxes.tile_q + 1;
  const int64_t tiles = p.packed_q() ? (row_tiles + p.n_seqs) * p.h_q  // at most
                                     : (a.q.extent[2] + boxes.tile_q - 1) / boxes.tile_q * p.h_q * p.n_seqs;
  if (tiles > (int64_t{1} << 30))
    return {FFPA_NOT_SUPPORTED, words("q: B * H_q * N_q / ", boxes.tile_q, " must be at most 2^30, but is ", tiles)};
  f->n_tiles = static_cast<int>(tiles);
  // Uneven tiles are taken heaviest first over as many heads as keep their K and V in a good half of L2 (60 MB).
  const int64_t head_bytes = std::max<int64_t>(a.k.extent[2] * (p.d_qk + p.d_v) * 2, 1);
  f->section =
      f->heavy_last ? static_cast<int>(std::clamp<int64_t>((int64_t{40} << 20) / head_bytes, 1, 1 << 20) * p.group) : 1;
  return {};
}

int workers(const attn::ForwardParams& f, int resident) {
  if (f.cu_seqlens_q) return resident;
  return f.heavy_last ? f.n_tiles : f.n_tiles < resident ? f.n_tiles : resident;
}

}  // namespace ffpa::sm90
