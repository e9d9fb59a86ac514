//! What decode.rs uses of ffpa.h, by hand. SPDX-License-Identifier: Apache-2.0
use std::ffi::{c_char, c_void};

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Tensor { pub data: usize, pub dtype: i32, pub device: [i32; 2], pub rank: i32, pub extent: [i64; 4], pub stride: [i64; 4] }

pub const FP32: i32 = 2;
pub const INT32: i32 = 6;

impl Tensor {
    /// A row-major view of `data` (f32 or i32), which must outlive the calls that use it.
    pub fn new<T>(data: &mut [T], dtype: i32, extents: &[i64]) -> Tensor {
        assert_eq!((data.len() as i64, std::mem::size_of::<T>()), (extents.iter().product(), 4));
        let mut t = Tensor { data: data.as_mut_ptr() as usize, dtype, rank: extents.len() as i32, ..Default::default() };
        let mut step = 1;
        for axis in (0..extents.len()).rev() {
            (t.extent[axis], t.stride[axis]) = (extents[axis], step);
            step *= extents[axis];
        }
        t
    }
}

#[repr(C)]
pub struct ForwardProblem {
    struct_size: u64,
    pub q: Tensor, pub k: Tensor, pub v: Tensor, pub o: Tensor, pub lse: Tensor,
    pub mask: Tensor, pub bias: Tensor, pub alibi_slopes: Tensor, pub sinks: Tensor,
    pub cu_seqlens_q: Tensor, pub cu_seqlens_kv: Tensor, pub seqlens_kv: Tensor, pub block_table: Tensor, pub kv_batch_idx: Tensor,
    scales: [Tensor; 3], pub dropout_state: Tensor,
    pub scale: f64, pub softcap: f64, pub dropout_p: f64, pub dropout_seed: u64, pub dropout_offset: u64,
    pub window_left: i64, pub window_right: i64, pub max_seqlen_q: i64, pub max_seqlen_kv: i64,
    pub has_scale: i32, pub causal: i32, pub anchor: i32, pub deterministic: i32, pub batch_invariant: i32,
    pub num_splits: i32, pub num_threads: i32, pub engine: i32, pub kernel: *const c_char,
}

#[repr(C)]
pub struct AppendProblem {
    struct_size: u64,
    pub k_new: Tensor, pub v_new: Tensor, pub k_cache: Tensor, pub v_cache: Tensor,
    pub seqlens_kv: Tensor, pub block_table: Tensor, pub kv_batch_idx: Tensor,
    pub rotary_cos: Tensor, pub rotary_sin: Tensor, pub q: Tensor, pub q_rotated: Tensor,
    pub rotary_interleaved: i32, pub rotary_q_fixed: i32, pub num_threads: i32,
}

#[repr(C)]
pub struct Plan { struct_size: u64, pub workspace_bytes: u64, fingerprint: u64, rest: [i32; 12] }

#[link(name = "ffpa")]
extern "C" {
    pub fn ffpa_last_error() -> *const c_char;
    pub fn ffpa_forward_problem_init(problem: *mut ForwardProblem);
    pub fn ffpa_append_problem_init(problem: *mut AppendProblem);
    pub fn ffpa_forward_plan(problem: *const ForwardProblem, plan: *mut Plan) -> i32;
    pub fn ffpa_forward_run(p: *const ForwardProblem, plan: *const Plan, workspace: *mut c_void, bytes: usize, stream: *mut c_void) -> i32;
    pub fn ffpa_append(problem: *const AppendProblem, stream: *mut c_void) -> i32;
}
