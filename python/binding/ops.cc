// ffpa::forward, ffpa::backward, ffpa::append_kv_ in torch's registry. SPDX-License-Identifier: Apache-2.0
//
// Each op takes every option of the C ABI, allocates its outputs and workspace from torch (caching allocator, CUDA-graph
// safe) and runs on torch's current stream and number of threads. It knows no autograd, vmap or fake tensors: those are
// written in Python (python/ffpa/_ops.py, _autograd.py).
//
// Errors: std::runtime_error, which torch turns into RuntimeError, with the C ABI's text. Text of FFPA_NOT_SUPPORTED is
// prefixed with the status' name: Python makes NotImplementedError of it, for which the stable interface has no means.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>

#include "tensors.h"

namespace ffpa::binding {
namespace {

#define FFPA_PROBLEM_SCHEMA                                                                                    \
  "Tensor q, Tensor k, Tensor v, Tensor? mask=None, Tensor? bias=None, float? scale=None, bool causal=False, " \
  "float dropout_p=0.0, Tensor? dropout_state=None, Tensor? sinks=None, Tensor? alibi_slopes=None, "           \
  "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, Tensor? seqlens_kv=None, Tensor? block_table=None, " \
  "Tensor? kv_batch_idx=None, bool bottom_right=False, SymInt window_left=-1, SymInt window_right=-1, "        \
  "float softcap=0.0, SymInt max_seqlen_q=0, SymInt max_seqlen_kv=0, bool deterministic=False, "               \
  "bool batch_invariant=False, int num_splits=0, int engine=0, str? kernel_name=None"

// needs: bits of the gradients that will be wanted, dq 1, dk 2, dv 4, dbias 8, dsinks 16. What has no backward is refused.
constexpr const char* kForwardSchema = "forward(" FFPA_PROBLEM_SCHEMA ", int needs=0) -> (Tensor o, Tensor lse)";

// needs: the same bits; the gradients that are not wanted are returned with no elements.
constexpr const char* kBackwardSchema =
    "backward(Tensor dout, Tensor? dlse, Tensor o, Tensor lse, int needs, " FFPA_PROBLEM_SCHEMA
    ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)";

// The result is q rotated, or has no elements if there is no q.
constexpr const char* kAppendSchema =
    "append_kv_(Tensor k_new, Tensor? v_new, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor? seqlens_kv=None, "
    "Tensor? block_table=None, Tensor? kv_batch_idx=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? q=None, bool rotary_interleaved=False, bool rotary_q_fixed=False) -> Tensor q_rotated";

void check_status(ffpa_status status, const char* before = "", const char* after = "") {
  if (status == FFPA_OK) return;
  std::string text = std::string(before) + ffpa_last_error() + after;
  if (status == FFPA_NOT_SUPPORTED) text = std::string(ffpa_status_name(status)) + ": " + text;
  throw std::runtime_error(text);
}

int32_t num_threads(const ffpa_tensor& q) {
  uint32_t threads = 0;
  if (q.device_type == FFPA_CPU) check(torch_get_num_threads(&threads), "its number of threads");
  return static_cast<int32_t>(threads < 4096 ? threads : 4096);
}

// Device and stream of a call; nothing on the CPU. The dispatcher sets no device for custom ops, and the stream getter
// lives in libtorch_cuda.so, which a CPU build does not have: so it is looked up in what is loaded, not linked.
class Place {
 public:
  explicit Place(const ffpa_tensor& q) {
    if (q.device_type == FFPA_CPU) return;
    using Getter = AOTITorchError (*)(int32_t, void**);
    static const Getter get_stream = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return library ? reinterpret_cast<Getter>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
    }();
    if (!get_stream) throw std::runtime_error("q: lies on a CUDA device, but this torch has no CUDA");
    check(get_stream(q.device_index, &stream_), "its current stream");
    check(aoti_torch_create_device_guard(q.device_index, &guard_), "its device");
  }
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;
  ~Place() {
    if (guard_) aoti_torch_delete_device_guard(guard_);
  }
  void* stream() const { return stream_; }

 private:
  DeviceGuardHandle guard_ = nullptr;
  void* stream_ = nullptr;
};

// Scratch memory, aligned as the C ABI asks, which is more than torch promises on the CPU.
class Workspace {
 public:
  Workspace(const ffpa_tensor& on, uint64_t bytes) : bytes_(bytes) {
    if (!bytes) return;
    const int64_t extent = static_cast<int64_t>(bytes + kAlignment), stride = 1;
    memory_ = empty(on, 1, &extent, &stride, aoti_torch_dtype_uint8());
    void* start = nullptr;
    check(torch_get_mutable_data_ptr(memory_.get(), &start), "workspace");
    data_ = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(start) + kAlignment - 1) / kAlignment * kAlignment);
  }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr uint64_t kAlignment = 256;
  Handle memory_;
  void* data_ = nullptr;
  size_t bytes_;
};

// FFPA_PROBLEM_SCHEMA, argument by argument.
struct ProblemArguments {
  explicit ProblemArguments(Arguments& a)
      : q(a.tensor()),
        k(a.tensor()),
        v(a.tensor()),
        mask(a.optional_tensor()),
        bias(a.optional_tensor()),
        scale(a.optional_real()),
        causal(a.boolean()),
        dropout_p(a.real()),
        dropout_state(a.optional_tensor()),
        sinks(a.optional_tensor()),
        alibi_slopes(a.optional_tensor()),
        cu_seqlens_q(a.optional_tensor()),
        cu_seqlens_kv(a.optional_tensor()),
        seqlens_kv(a.optional_tensor()),
        block_table(a.optional_tensor()),
        kv_batch_idx(a.optional_tensor()),
        bottom_right(a.boolean()),
        window_left(a.integer()),
        window_right(a.integer()),
        softcap(a.real()),
        max_seqlen_q(a.integer()),
        max_seqlen_kv(a.integer()),
        deterministic(a.boolean()),
        batch_invariant(a.boolean()),
        num_splits(a.integer()),
        engine(a.integer()),
        kernel(a.optional_string()) {}

  // Everything but o and lse.
  void fill(ffpa_forward_problem* p) const {
    p->q = view("q", q);
    p->k = view("k", k);
    p->v = view("v", v);
    p->mask = view("mask", mask);
    p->bias = view("bias", bias);
    p->alibi_slopes = view("alibi_slopes", alibi_slopes);
    p->sinks = view("sinks", sinks);
    p->cu_seqlens_q = view("cu_seqlens_q", cu_seqlens_q);
    p->cu_seqlens_kv = view("cu_seqlens_kv", cu_seqlens_kv);
    p->seqlens_kv = view("seqlens_kv", seqlens_kv);
    p->block_table = view("block_table", block_table);
    p->kv_batch_idx = view("kv_batch_idx", kv_batch_idx);
    p->dropout_state = view("dropout_state", dropout_state);
    if (scale) p->scale = *scale;
    p->has_scale = scale.has_value();
    p->softcap = softcap;
    p->dropout_p = dropout_p;
    p->window_left = window_left;
    p->window_right = window_right;
    p->max_seqlen_q = max_seqlen_q;
    p->max_seqlen_kv = max_seqlen_kv;
    p->causal = causal;
    p->anchor = bottom_right ? FFPA_BOTTOM_RIGHT : FFPA_TOP_LEFT;
    p->deterministic = deterministic;
    p->batch_invariant = batch_invariant;
    p->num_splits = narrow("num_splits", num_splits);
    p->num_threads = binding::num_threads(p->q);
    p->engine = narrow("engine", engine);
    p->kernel = kernel.c_str();
  }

  static int32_t narrow(const char* name, int64_t value) {
    if (value != static_cast<int32_t>(value))
      throw std::runtime_error(std::string(name) + ": must fit 32 bits, but is " + std::to_string(value));
    return static_cast<int32_t>(value);
  }

  Handle q, k, v, mask, bias;
  std::optional<double> scale;
  bool causal;
  double dropout_p;
  Handle dropout_state, sinks, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, seqlens_kv, block_table, kv_batch_idx;
  bool bottom_right;
  int64_t window_left, window_right;
  double softcap;
  int64_t max_seqlen_q, max_seqlen_kv;
  bool deterministic, batch_invariant;
  int64_t num_splits, engine;
  Text kernel;
};

// Refuses a forward whose gradients no kernel could compute afterwards.
void check_backward_exists(const ffpa_forward_problem& forward, int64_t needs) {
  ffpa_backward_problem p;
  ffpa_backward_problem_init(&p);
  p.forward = forward;
  p.dout = forward.o;
  uintptr_t nowhere = 0;  // a plan touches no memory, but wants aligned addresses apart from each other
  const auto gradient_of = [&](int bit, const ffpa_tensor& x) {
    ffpa_tensor gradient{};
    if (!(needs >> bit & 1) || x.rank == 0) return gradient;
    gradient = x;
    dense_strides(x, x.extent, gradient.stride);
    gradient.data = reinterpret_cast<void*>(nowhere += uintptr_t{1} << 60);
    return gradient;
  };
  p.dq = gradient_of(0, forward.q);
  p.dk = gradient_of(1, forward.k);
  p.dv = gradient_of(2, forward.v);
  p.dbias = gradient_of(3, forward.bias);
  p.dsinks = gradient_of(4, forward.sinks);
  ffpa_plan plan;
  check_status(ffpa_backward_plan(&p, &plan), "gradients are required, but the backward would be refused: ",
               " (if none are wanted, call under torch.no_grad())");
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments taken(stack);
  const ProblemArguments args(taken);
  const int64_t needs = taken.integer();
  ffpa_forward_problem p;
  ffpa_forward_problem_init(&p);
  args.fill(&p);
  Handle o, lse;
  if (p.q.rank == 4 && p.v.rank == 4) {  // else the plan says what is wrong
    const int64_t extent[4] = {p.q.extent[0], p.q.extent[1], p.q.extent[2], p.v.extent[3]};
    const int64_t n = std::max<int64_t>(extent[2], 1), stride[3] = {std::max<int64_t>(extent[1], 1) * n, n, 1};
    o = dense_like(p.q, extent, torch_dtype(args.q));
    lse =
        empty(p.q, 3, extent, stride, p.q.dtype == FFPA_FP64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32());
    p.o = view("o", o, Use::kWritten);
    p.lse = view("lse", lse, Use::kWritten);
  }
  ffpa_plan plan;
  check_status(ffpa_forward_plan(&p, &plan));
  if (needs) check_backward_exists(p, needs);
  const Workspace workspace(p.q, plan.workspace_bytes);
  const Place place(p.q);
  check_status(ffpa_forward_run(&p, &plan, workspace.data(), workspace.bytes(), place.stream()));
  stack[0] = o.hand_over();
  stack[1] = lse.hand_over();
}

void backward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments taken(stack);
  const Handle dout = taken.tensor(), dlse = taken.optional_tensor(), o = taken.tensor(), lse = taken.tensor();
  const int64_t needs = taken.integer();
  const ProblemArguments args(taken);
  ffpa_backward_problem p;
  ffpa_backward_problem_init(&p);
  args.fill(&p.forward);
  p.forward.o = view("o", o);
  p.forward.lse = view("lse", lse);
  p.dout = view("dout", dout);
  p.dlse = view("dlse", dlse);

  Handle gradients[5];
  const auto allocate = [&](int i, const char* name, const Handle& of, const ffpa_tensor& like, ffpa_tensor* gradient) {
    if (of && (needs >> i & 1)) {
      gradients[i] = dense_like(like, like.extent, torch_dtype(of));
      *gradient = view(name, gradients[i], Use::kWritten);
    } else {
      gradients[i] = nothing(p.forward.q);
    }
  };
  allocate(0, "dq", args.q, p.forward.q, &p.dq);
  allocate(1, "dk", args.k, p.forward.k, &p.dk);
  allocate(2, "dv", args.v, p.forward.v, &p.dv);
  allocate(3, "dbias", args.bias, p.forward.bias, &p.dbias);
  allocate(4, "dsinks", args.sinks, p.forward.sinks, &p.dsinks);

  ffpa_plan plan;
  check_status(ffpa_backward_plan(&p, &plan));
  const Workspace workspace(p.forward.q, plan.workspace_bytes);
  const Place place(p.forward.q);
  check_status(ffpa_backward_run(&p, &plan, workspace.data(), workspace.bytes(), place.stream()));
  for (int i = 0; i < 5; ++i) stack[i] = gradients[i].hand_over();
}

void append_kv_(StableIValue* stack, uint64_t, uint64_t) {
  Arguments taken(stack);
  const Handle k_new = taken.tensor(), v_new = taken.optional_tensor(), k_cache = taken.tensor(),
               v_cache = taken.optional_tensor(), seqlens_kv = taken.optional_tensor(),
               block_table = taken.optional_tensor(), kv_batch_idx = taken.optional_tensor(),
               rotary_cos = taken.optional_tensor(), rotary_sin = taken.optional_tensor(), q = taken.optional_tensor();
  const bool interleaved = taken.boolean(), q_fixed = taken.boolean();
  ffpa_append_problem p;
  ffpa_append_problem_init(&p);
  p.k_new = view("k_new", k_new);
  p.v_new = view("v_new", v_new);
  p.k_cache = view("k_cache", k_cache, Use::kWritten);
  p.v_cache = view("v_cache", v_cache, Use::kWritten);
  p.seqlens_kv = view("seqlens_kv", seqlens_kv);
  p.block_table = view("block_table", block_table);
  p.kv_batch_idx = view("kv_batch_idx", kv_batch_idx);
  p.rotary_cos = view("rotary_cos", rotary_cos);
  p.rotary_sin = view("rotary_sin", rotary_sin);
  p.q = view("q", q);
  p.rotary_interleaved = interleaved;
  p.rotary_q_fixed = q_fixed;
  p.num_threads = num_threads(p.k_new);
  Handle rotated;
  if (q) {
    rotated = dense_like(p.q, p.q.extent, torch_dtype(q));
    p.q_rotated = view("q_rotated", rotated, Use::kWritten);
  } else {
    rotated = nothing(p.k_new);
  }
  const Place place(p.k_new);
  check_status(ffpa_append(&p, place.stream()));
  stack[0] = rotated.hand_over();
}

// A second copy of this library, or another that uses the name, finds the ops defined: torch refuses, and we stop, with
// the first copy's ops in force. The registrations are never taken back.
bool register_ops() {
  const auto kernels = [](const char* device) {
    constexpr uint64_t kBuiltFor = uint64_t{2} << 56 | uint64_t{10} << 48;  // torch 2.10
    TorchLibraryHandle library = nullptr;
    return !aoti_torch_library_init_impl("ffpa", device, __FILE__, __LINE__, &library) &&
           !torch_library_impl(library, "forward", forward, kBuiltFor) &&
           !torch_library_impl(library, "backward", backward, kBuiltFor) &&
           !torch_library_impl(library, "append_kv_", append_kv_, kBuiltFor);
  };
  TorchLibraryHandle library = nullptr;
  return !aoti_torch_library_init_fragment("ffpa", __FILE__, __LINE__, &library) &&
         !aoti_torch_library_def(library, kForwardSchema) && !aoti_torch_library_def(library, kBackwardSchema) &&
         !aoti_torch_library_def(library, kAppendSchema) && kernels("CPU") && kernels("CUDA");
}

[[maybe_unused]] const bool registered = register_ops();

}  // namespace
}  // namespace ffpa::binding
