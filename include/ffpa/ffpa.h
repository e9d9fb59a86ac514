/* ffpa.h: the plain C interface of ffpa, exact attention for head dims from 1 to 1024. SPDX-License-Identifier: Apache-2.0
 *
 * Life of a call:  fill a problem -> plan (validates, picks a kernel, states workspace bytes) -> run (any number of times).
 *
 *   ffpa_forward_problem p;
 *   ffpa_forward_problem_init(&p);                   // defaults of every option
 *   p.q = ...; p.k = ...; p.v = ...; p.o = ...;
 *   ffpa_plan plan;
 *   if (ffpa_forward_plan(&p, &plan) != FFPA_OK) puts(ffpa_last_error());
 *   void* workspace = malloc(plan.workspace_bytes);
 *   ffpa_forward_run(&p, &plan, workspace, plan.workspace_bytes, NULL);
 *
 * What is computed, for query row i of N_q and key j of N_kv (query head h reads key head h / (H_q / H_kv)):
 *   s    = scale * q[i] . k[j]                       scale may be 0 or negative
 *   s    = softcap * tanh(s / softcap)               when softcap > 0
 *   s   += bias[i, j] - slope[h] * |i + N_kv - N_q - j|
 *   p    = exp(s - lse[i]) over the visible keys;    visible = mask, causal, window and lengths together
 *   o[i] = sum_j drop(p[j]) * v[j];                  lse[i] = log(sum_j exp(s[j]) + exp(sink[h])), natural log
 * A row that sees no key gives o = 0 and lse = -inf (the sink's value if there is one), and zero gradients.
 * A NaN in a visible score gives NaN. Memory past a length, extent or page is never read into arithmetic; a NaN or infinity in a
 * row of k or v that only mask, causality, window or dropout hide may spread (0 * NaN), as in plain arithmetic.
 *
 * Symbols: B batch (or sequences), H_q and H_kv heads, N_q and N_kv rows, D_qk and D_v widths, T_q and T_kv rows of all packed
 * sequences together, P pages. Extents and strides are in elements. Every extent may be 0; strides may be 0 or unaligned.
 *
 * Threads: every function may be called from any thread. A plan is plain data: copy it, share it, keep it as long as you like.
 */
#ifndef FFPA_FFPA_H_
#define FFPA_FFPA_H_

#include <stddef.h>
#include <stdint.h>

#define FFPA_VERSION_MAJOR 0
#define FFPA_VERSION_MINOR 1
#define FFPA_VERSION_PATCH 0
#define FFPA_VERSION (FFPA_VERSION_MAJOR * 10000 + FFPA_VERSION_MINOR * 100 + FFPA_VERSION_PATCH)

#if defined(FFPA_BUILDING) && defined(__GNUC__)
#define FFPA_API __attribute__((visibility("default")))
#else
#define FFPA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------------ status */

typedef enum ffpa_status {
  FFPA_OK = 0,
  FFPA_INVALID_ARGUMENT = 1, /* a value, extent, dtype or device breaks a rule; nothing was written */
  FFPA_NOT_SUPPORTED = 2,    /* valid, but no kernel of this build and machine computes it; nothing was written */
  FFPA_WORKSPACE = 3,        /* workspace missing or smaller than plan.workspace_bytes; nothing was written */
  FFPA_DEVICE_ERROR = 4,     /* the device runtime reported an error; the text carries its own words */
  FFPA_INTERNAL = 5          /* a defect of this library */
} ffpa_status;

/* Text of this thread's last status other than FFPA_OK, e.g. "k: extent 3 (D_qk) must equal q's, 64, but is 32".
 * Never NULL; valid until this thread's next ffpa call. */
FFPA_API const char* ffpa_last_error(void);
/* "FFPA_INVALID_ARGUMENT" and so on; "unknown status" for other values. */
FFPA_API const char* ffpa_status_name(ffpa_status status);
/* FFPA_VERSION of the library that is loaded (the macro is that of the header). */
FFPA_API int ffpa_version(void);

/* ------------------------------------------------------------------------------------------------------------ tensors */

typedef enum ffpa_dtype {
  FFPA_DTYPE_NONE = 0,
  FFPA_FP64 = 1,
  FFPA_FP32 = 2,
  FFPA_FP16 = 3,
  FFPA_BF16 = 4,
  FFPA_BOOL = 5, /* one byte, 0 = false */
  FFPA_INT32 = 6,
  FFPA_INT64 = 7,
  FFPA_FP8_E4M3 = 8, /* reserved for quantised K/V */
  FFPA_FP4_E2M1 = 9, /* reserved for quantised K/V */
  FFPA_INT8 = 10     /* reserved for quantised K/V */
} ffpa_dtype;

typedef enum ffpa_device_type { FFPA_CPU = 0, FFPA_CUDA = 1 } ffpa_device_type;

#define FFPA_MAX_RANK 4

/* A strided view. An all-zero ffpa_tensor means "absent". A tensor with an extent of 0 may have a null pointer; any other
 * is aligned to its element's size. Extents are at most 2^31 - 1. All tensors of a problem lie on one device. A tensor that is
 * written shares no byte with another tensor of the call. Interleaved views are fine (q, k, v, o side by side in one
 * [N, 4, H, D] buffer): not spans count but elements. Sharing is refused where a bounded search finds it, always between views
 * with the strides of one buffer; elsewhere it is the caller's duty. */
typedef struct ffpa_tensor {
  void* data;
  int32_t dtype;        /* ffpa_dtype */
  int32_t device_type;  /* ffpa_device_type */
  int32_t device_index; /* 0 on the CPU */
  int32_t rank;         /* 0 = absent, else 1 to FFPA_MAX_RANK */
  int64_t extent[FFPA_MAX_RANK];
  int64_t stride[FFPA_MAX_RANK]; /* elements; may be 0 (broadcast) for inputs, negative strides are refused */
} ffpa_tensor;

/* ----------------------------------------------------------------------------------------------------------- problems */

typedef enum ffpa_anchor {
  FFPA_TOP_LEFT = 0,    /* row i's diagonal key is i            (torch's SDPA) */
  FFPA_BOTTOM_RIGHT = 1 /* row i's diagonal key is i + N_kv - N_q (flash-attn) */
} ffpa_anchor;

typedef enum ffpa_engine {
  FFPA_ENGINE_AUTO = 0, /* the best kernel that takes the problem */
  FFPA_ENGINE_REF = 1,  /* plain loops in double: the oracle; CPU tensors */
  FFPA_ENGINE_CPU = 2,  /* vectorised CPU kernels */
  FFPA_ENGINE_CUDA = 3
} ffpa_engine;

/* Forward. Absent tensors are all zero. Shapes by mode:
 *   dense   q [B, H_q, N_q, D_qk]   k [B, H_kv, N_kv, D_qk]   v [B, H_kv, N_kv, D_v]   o [B, H_q, N_q, D_v]   lse [B, H_q, N_q]
 *   packed  q [1, H_q, T_q, D_qk], o and lse likewise, when cu_seqlens_q is given; k and v [1, H_kv, T_kv, D] when cu_seqlens_kv
 *           is given. Packed q with dense or paged K/V is right too; packed k and v need packed q. B = number of sequences.
 *   paged   k and v [P, H_kv, page rows, D] when block_table is given: key j of sequence b is row j % rows of page
 *           block_table[b, j / rows].
 * Rows i and j, N_q and N_kv below are those of one sequence. */
typedef struct ffpa_forward_problem {
  uint64_t struct_size; /* set by ffpa_forward_problem_init */

  ffpa_tensor q, k, v; /* fp64 (reference engine only), fp32, fp16 or bf16, all alike; any strides */
  ffpa_tensor o;       /* written; q's dtype; any strides without overlap */
  ffpa_tensor lse;     /* written; fp32 (fp64 if q is); may be absent */

  ffpa_tensor mask; /* bool [B|1, H_q|1, N_q|1, N_kv|1], true = visible; packed or paged: N at least the longest's */
  ffpa_tensor bias; /* fp32 or q's dtype, same extents; added to the score; -inf hides a key */
  ffpa_tensor alibi_slopes; /* fp32 [H_q] or [B, H_q] */
  ffpa_tensor sinks;        /* fp32 or q's dtype [H_q]: a logit that joins the softmax and has no value row */

  /* int32 [B + 1]: sequence b is rows cu[b] to cu[b+1]-1 of T_q; starts at 0, never falls; rows from cu[B] on belong to
   * nobody: o = 0, lse = -inf, gradients 0. cu_seqlens_kv: the same for T_kv. */
  ffpa_tensor cu_seqlens_q, cu_seqlens_kv;
  /* int32 [B]: keys of sequence b, at most what its K/V holds; absent = all of them. Lengths may change between runs of
   * one plan, as may the tables and the values of cu_seqlens. */
  ffpa_tensor seqlens_kv;
  ffpa_tensor block_table;  /* int32 [B, pages per sequence]; entries past a sequence's length are not read */
  ffpa_tensor kv_batch_idx; /* int32 [B]: which batch row of dense k and v sequence b reads; absent = b */

  ffpa_tensor q_scale, k_scale, v_scale; /* reserved for quantised inputs: refused today */
  ffpa_tensor dropout_state;             /* int64 [2] {seed, offset} on q's device; absent = the two fields below */

  double scale;                          /* factor on q.k, read if has_scale; else 1/sqrt(D_qk) */
  double softcap;                        /* 0 = off, else > 0 */
  double dropout_p;                      /* in [0, 1]; kept probabilities are multiplied by 1/(1-p) */
  uint64_t dropout_seed, dropout_offset; /* the mask depends on (seed, offset, b, h, i, j) alone: src/core/philox.h */
  int64_t window_left, window_right;     /* keys from diagonal - left to diagonal + right, inclusive; -1 = unbounded */
  int64_t max_seqlen_q, max_seqlen_kv;   /* packed or paged: upper bounds known to the host; 0 = not known */
  int32_t has_scale;
  int32_t causal;          /* 0 or 1: keys up to the diagonal */
  int32_t anchor;          /* ffpa_anchor of the diagonal, for causal and window */
  int32_t deterministic;   /* 1: bits repeat from call to call on one machine, also in the backward */
  int32_t batch_invariant; /* 1: the bits of a sequence do not depend on the others in the call */
  int32_t num_splits;      /* forward: parts of N_kv worked on in parallel, 0 to 1024; 0 = planned */
  int32_t num_threads;     /* CPU; 0 = as many as the machine allows */
  int32_t engine;          /* ffpa_engine */
  /* name of a kernel to force (ffpa_kernel_at lists them), or NULL. In a backward problem the name of a forward kernel forces
   * the backward kernels of its <arch>. With neither kernel nor engine given the environment variable FFPA_KERNEL may force
   * kernels by name, separated by commas, each for its pass */
  const char* kernel;
} ffpa_forward_problem;

/* Backward. `forward` is the forward's problem with o and lse as it wrote them. An absent gradient is not computed; at least one
 * must be present. Gradients are overwritten, not accumulated into; sums over heads, batch and broadcast are taken in fp32 or wider. */
typedef struct ffpa_backward_problem {
  uint64_t struct_size; /* set by ffpa_backward_problem_init */
  ffpa_forward_problem forward;
  ffpa_tensor dout;       /* like o; any strides, 0 included */
  ffpa_tensor dlse;       /* like lse: gradient of lse; absent = 0 */
  ffpa_tensor dq, dk, dv; /* extents of q, k, v; their dtype; any strides without overlap. Not with block_table */
  ffpa_tensor dbias;      /* extents of bias (extent 1 = summed); bias's dtype */
  ffpa_tensor dsinks;     /* [H_q], sinks' dtype */
} ffpa_backward_problem;

FFPA_API void ffpa_forward_problem_init(ffpa_forward_problem* problem);
FFPA_API void ffpa_backward_problem_init(ffpa_backward_problem* problem);

/* --------------------------------------------------------------------------------------------------------- plan and run */

/* What will run. Plain data; fill by ffpa_*_plan only. Fields after workspace_bytes are the library's own. */
typedef struct ffpa_plan {
  uint64_t struct_size;
  uint64_t workspace_bytes;
  uint64_t fingerprint; /* of the problem's extents, strides, dtypes, options and pointer alignments */
  int32_t kernel;       /* index for ffpa_kernel_at */
  int32_t num_splits;
  int32_t num_threads;
  int32_t reserved[9];
} ffpa_plan;

/* Validate and choose. On failure *plan is left zeroed. Reads no tensor data, except lengths and tables that lie in host memory.
 * FFPA_LOG=1 in the environment prints each new plan to stderr. */
FFPA_API ffpa_status ffpa_forward_plan(const ffpa_forward_problem* problem, ffpa_plan* plan);
FFPA_API ffpa_status ffpa_backward_plan(const ffpa_backward_problem* problem, ffpa_plan* plan);

/* Run a plan on the same problem; tensors may point elsewhere so long as extents, strides, dtypes, options and alignment to
 * 16 bytes are those that were planned (checked; FFPA_INVALID_ARGUMENT otherwise). Lengths, tables and the dropout seed may
 * change. `workspace`: at least plan->workspace_bytes, 256-byte aligned, on the problem's device, contents do not matter; NULL if
 * 0 bytes. On the CPU `stream` is NULL and the work is done on return. On a GPU the work is put on `stream`, a cudaStream_t of
 * the tensors' device (NULL: that device's default stream), in the stream's order; workspace and tensors must live until it
 * is done. The thread's current device does not matter and is the same afterwards. Does not allocate device memory,
 * synchronise or print. */
FFPA_API ffpa_status ffpa_forward_run(const ffpa_forward_problem* problem, const ffpa_plan* plan, void* workspace,
                                      size_t workspace_bytes, void* stream);
FFPA_API ffpa_status ffpa_backward_run(const ffpa_backward_problem* problem, const ffpa_plan* plan, void* workspace,
                                       size_t workspace_bytes, void* stream);

/* Say in words what would run and why every better kernel was refused, one line each:
 *   "kernel: NAME", "engine: NAME", "workspace: N bytes", "splits: N", then "refused NAME: REASON".
 * Writes at most `bytes` bytes with the final NUL, returns the bytes needed with it. An invalid problem is explained by its error. */
FFPA_API size_t ffpa_forward_explain(const ffpa_forward_problem* problem, char* text, size_t bytes);
FFPA_API size_t ffpa_backward_explain(const ffpa_backward_problem* problem, char* text, size_t bytes);

/* ------------------------------------------------------------------------------------------------------------ K/V cache */

/* Append rows to a K/V cache, in place, at positions seqlens_kv[b] onwards of each sequence; rotate keys on the way if asked.
 * The caller adds N_new to seqlens_kv afterwards. Positions beyond the cache are refused where the host can read the lengths. */
typedef struct ffpa_append_problem {
  uint64_t struct_size; /* set by ffpa_append_problem_init */
  ffpa_tensor k_new,
      v_new; /* [B, H_kv, N_new, D_qk], [B, H_kv, N_new, D_v]; v_new and v_cache may be absent together */
  ffpa_tensor k_cache,
      v_cache;            /* written: [B_cache, H_kv, capacity, D], or pages [P, H_kv, page rows, D] with block_table */
  ffpa_tensor seqlens_kv; /* int32 [B]: keys already there; absent = 0 */
  ffpa_tensor block_table;  /* int32 [B, pages per sequence], or absent */
  ffpa_tensor kv_batch_idx; /* int32 [B], or absent */
  ffpa_tensor rotary_cos,
      rotary_sin; /* fp32 or k's dtype [positions, R/2]: rotate the first R of D_qk; absent = none */
  ffpa_tensor q,
      q_rotated; /* optional: rotate q [B, H_q, N_q, D_qk] too, row i at position seqlens_kv[b] + i, into q_rotated (q itself
                  * or apart from it) */
  int32_t rotary_interleaved; /* 1: pairs (2i, 2i+1); 0: pairs (i, i + R/2) */
  int32_t rotary_q_fixed;     /* 1: every row of q takes position seqlens_kv[b] (flash-attn without causal or window) */
  int32_t num_threads;
} ffpa_append_problem;

FFPA_API void ffpa_append_problem_init(ffpa_append_problem* problem);
/* Validate and run; needs no workspace. */
FFPA_API ffpa_status ffpa_append(const ffpa_append_problem* problem, void* stream);

/* --------------------------------------------------------------------------------------------- what this build and machine have */

typedef struct ffpa_kernel_info {
  uint64_t struct_size; /* sizeof(ffpa_kernel_info), set by the caller */
  const char* name;     /* <arch>_<pass>_<idea> */
  const char* summary;  /* one line */
  int32_t pass;         /* 0 forward, 1 backward */
  int32_t engine;       /* ffpa_engine */
  int32_t usable;       /* 1 if this machine can run it */
  uint32_t dtypes;      /* bit (1 << ffpa_dtype) for each dtype of q that it takes */
  int64_t min_d, max_d; /* head dims it takes; max_d 0 = no limit */
} ffpa_kernel_info;

typedef struct ffpa_device_info {
  uint64_t struct_size;        /* sizeof(ffpa_device_info), set by the caller */
  char name[128];              /* CPU model or GPU name */
  char features[128];          /* "avx2 avx512 avx512_bf16 amx_bf16", or "sm_90" */
  int32_t processors;          /* threads this process may use, or SMs */
  int32_t shared_memory_bytes; /* most per block, opt-in; 0 on the CPU */
  int64_t memory_bytes;
} ffpa_device_info;

FFPA_API int ffpa_kernel_count(void);
/* FFPA_INVALID_ARGUMENT if index is not in [0, ffpa_kernel_count()). Strings are static. */
FFPA_API ffpa_status ffpa_kernel_at(int index, ffpa_kernel_info* info);
/* Devices of a type: 1 for the CPU; GPUs that the driver shows, 0 without driver or CUDA kernels. */
FFPA_API int ffpa_device_count(ffpa_device_type type);
FFPA_API ffpa_status ffpa_device_at(ffpa_device_type type, int index, ffpa_device_info* info);

#ifdef __cplusplus
}
#endif
#endif /* FFPA_FFPA_H_ */
