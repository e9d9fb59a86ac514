// Every tensor of a problem with its name, for what concerns them all. SPDX-License-Identifier: Apache-2.0
//
// The problem may be const; body(const char* name, [const] ffpa_tensor&) is called for absent tensors too. A tensor
// added to ffpa.h is added here: the fingerprint and the checks of shared memory follow.
#pragma once

#include "ffpa/ffpa.h"

namespace ffpa {

template <class Forward, class Body>
void forward_tensors(Forward& f, Body&& body) {
  body("q", f.q);
  body("k", f.k);
  body("v", f.v);
  body("o", f.o);
  body("lse", f.lse);
  body("mask", f.mask);
  body("bias", f.bias);
  body("alibi_slopes", f.alibi_slopes);
  body("sinks", f.sinks);
  body("cu_seqlens_q", f.cu_seqlens_q);
  body("cu_seqlens_kv", f.cu_seqlens_kv);
  body("seqlens_kv", f.seqlens_kv);
  body("block_table", f.block_table);
  body("kv_batch_idx", f.kv_batch_idx);
  body("q_scale", f.q_scale);
  body("k_scale", f.k_scale);
  body("v_scale", f.v_scale);
  body("dropout_state", f.dropout_state);
}

template <class Backward, class Body>
void backward_tensors(Backward& b, Body&& body) {
  forward_tensors(b.forward, body);
  body("dout", b.dout);
  body("dlse", b.dlse);
  body("dq", b.dq);
  body("dk", b.dk);
  body("dv", b.dv);
  body("dbias", b.dbias);
  body("dsinks", b.dsinks);
}

template <class Append, class Body>
void append_tensors(Append& a, Body&& body) {
  body("k_new", a.k_new);
  body("v_new", a.v_new);
  body("k_cache", a.k_cache);
  body("v_cache", a.v_cache);
  body("seqlens_kv", a.seqlens_kv);
  body("block_table", a.block_table);
  body("kv_batch_idx", a.kv_batch_idx);
  body("rotary_cos", a.rotary_cos);
  body("rotary_sin", a.rotary_sin);
  body("q", a.q);
  body("q_rotated", a.q_rotated);
}

}  // namespace ffpa
