// SPDX-License-Identifier: Apache-2.0
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

Status fill_forward_params(const Problem& p, const Boxes& boxes, attn::ForwardParams* f) {
  const ffpa_forward_problem& a = p.fwd();
  fill_tma_params(p, f);
  const bool has_keys = a.k.extent[0] > 0 && a.k.extent[2] > 0;  // without, no copy is made
  if (has_keys && !(encode_rows(&f->q, a.q, boxes.q_rows) && encode_sequences(&f->k, a.k, f->ragged, boxes.k_rows) &&
                    encode_sequences(&f->v, a.v, f->ragged, boxes.v_rows)))
    return {FFPA_DEVICE_ERROR, "cuTensorMapEncodeTiled: refused q, k or v"};
  f->o = rows_out(a.o);
  f->lse = any::row_values(a.lse);
  return order_tiles(p, boxes.tile_q, f);
}

}  // namespace ffpa::sm90
