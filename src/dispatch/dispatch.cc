// SPDX-License-Identifier: Apache-2.0
#include "dispatch/dispatch.h"

#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>
#include <unordered_set>

#include "core/tensors.h"
#include "core/words.h"

// Declarations of every kernel's functions, straight from the table.
#define FFPA_KERNEL(name, pass, engine, dtypes, min_d, max_d, scope, summary)      \
  namespace ffpa::scope {                                                          \
  const char* machine_lacks();                                                     \
  std::string plan_##pass(const Problem&, Choice*);                                \
  Status run_##pass(const Problem&, const Choice&, void* workspace, void* stream); \
  }
#include "dispatch/kernels.def"
#undef FFPA_KERNEL

namespace ffpa {
namespace {

namespace dtypes {
constexpr uint32_t BF16 = 1u << FFPA_BF16;
constexpr uint32_t HALVES = BF16 | 1u << FFPA_FP16;
constexpr uint32_t FLOATS = HALVES | 1u << FFPA_FP32;
constexpr uint32_t ALL = FLOATS | 1u << FFPA_FP64;
}  // namespace dtypes

namespace passes {
constexpr Pass forward = Pass::kForward;
constexpr Pass backward = Pass::kBackward;
}  // namespace passes

constexpr Kernel kTable[] = {
#define FFPA_KERNEL(name, pass, engine, types, min_d, max_d, scope, summary)  \
  {#name, summary, passes::pass,         FFPA_ENGINE_##engine, dtypes::types, \
   min_d, max_d,   scope::machine_lacks, scope::plan_##pass,   scope::run_##pass},
#include "dispatch/kernels.def"
#undef FFPA_KERNEL
};

const char* pass_name(Pass pass) { return pass == Pass::kForward ? "forward" : "backward"; }

const Kernel* find_kernel(std::string_view name) {
  for (const Kernel& k : kTable)
    if (name == k.name) return &k;
  return nullptr;
}

// <arch> of <arch>_<pass>_<idea>
std::string_view arch(const Kernel& k) { return std::string_view(k.name).substr(0, std::strcspn(k.name, "_")); }

// What the caller or the environment insists on.
struct Forced {
  const Kernel* kernel = nullptr;  // of the other pass: any kernel of its arch
  int32_t engine = FFPA_ENGINE_AUTO;
  const char* by = "";  // "kernel", "engine" or "FFPA_KERNEL"
  Status status;

  bool admits(const Kernel& k) const {
    if (kernel) return kernel->pass == k.pass ? kernel == &k : arch(*kernel) == arch(k);
    return engine == FFPA_ENGINE_AUTO || engine == k.engine;
  }
};

Forced forced(const Problem& p) {
  Forced f;
  const auto unknown = [&](const char* by, std::string_view name) {
    f.status = {FFPA_INVALID_ARGUMENT,
                words(by, ": must name a kernel of this build (ffpa_kernel_at lists them), but is \"", name, "\"")};
    return f;
  };
  if (const char* name = p.fwd().kernel) {
    f.kernel = find_kernel(name);
    f.by = "kernel";
    if (!f.kernel) return unknown("kernel", name);
    if (f.kernel->pass == Pass::kBackward && p.pass == Pass::kForward)
      f.status = {FFPA_INVALID_ARGUMENT,
                  words("kernel: must name a forward kernel, but \"", name, "\" is a backward kernel")};
    else if (p.fwd().engine != FFPA_ENGINE_AUTO && p.fwd().engine != f.kernel->engine)
      f.status = {FFPA_INVALID_ARGUMENT,
                  words("kernel: must belong to the engine asked for, ", engine_name(p.fwd().engine), ", but \"", name,
                        "\" belongs to ", engine_name(f.kernel->engine))};
    return f;
  }
  if (p.fwd().engine != FFPA_ENGINE_AUTO) {
    f.engine = p.fwd().engine;
    f.by = "engine";
    return f;
  }
  const char* list = std::getenv("FFPA_KERNEL");
  for (std::string_view rest = list ? list : ""; !rest.empty();) {
    const size_t comma = rest.find(',');
    const std::string_view name = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? "" : rest.substr(comma + 1);
    if (name.empty()) continue;
    const Kernel* k = find_kernel(name);
    if (!k) return unknown("FFPA_KERNEL", name);
    if (k->pass == p.pass) f.kernel = k, f.by = "FFPA_KERNEL";
  }
  return f;
}

// Empty if the row of the table admits the problem on this machine, else the reason.
std::string row_refuses(const Kernel& k, const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  const int32_t reads = k.engine == FFPA_ENGINE_CUDA ? FFPA_CUDA : FFPA_CPU;
  if (f.q.device_type != reads)
    return words("q: must lie in ", device_name(reads), " memory, but lies in ", device_name(f.q.device_type),
                 " memory");
  if (!(k.dtypes >> f.q.dtype & 1u)) return words("q: dtype ", dtype_name(f.q.dtype), " is not one it takes");
  for (const auto& [symbol, d] : {std::pair{"D_qk", p.d_qk}, {"D_v", p.d_v}}) {
    if (d < k.min_d) return words(symbol, ": must be at least ", k.min_d, ", but is ", d);
    if (k.max_d && d > k.max_d) return words(symbol, ": must be at most ", k.max_d, ", but is ", d);
  }
  if (const char* lacks = k.machine_lacks()) return lacks;
  return {};
}

}  // namespace

std::span<const Kernel> kernel_table() { return kTable; }

Decision decide(const Problem& p) {
  Decision d;
  const Forced force = forced(p);
  if (force.status.code != FFPA_OK) {
    d.status = force.status;
    return d;
  }
  for (const Kernel& k : kTable) {
    if (k.pass != p.pass) continue;
    std::string reason;
    if (!force.admits(k))
      reason = words(force.by, " asks for ", force.kernel ? force.kernel->name : engine_name(force.engine));
    else
      reason = row_refuses(k, p);
    Choice choice;
    if (reason.empty()) reason = k.plan(p, &choice);
    if (reason.empty()) {
      d.kernel = &k;
      d.choice = choice;
      return d;
    }
    d.better.push_back({&k, std::move(reason)});
  }
  std::string text = words("no ", pass_name(p.pass), " kernel takes this problem");
  if (force.kernel && force.kernel->pass == p.pass)
    text = words(force.by, " \"", force.kernel->name, "\" does not take this problem");
  else if (force.kernel)
    text = words("no ", pass_name(p.pass), " kernel beside ", force.by, " \"", force.kernel->name,
                 "\" takes this problem");
  if (force.engine != FFPA_ENGINE_AUTO)
    text = words("engine \"", engine_name(force.engine), "\" does not take this problem");
  const char* separator = ": ";
  int named = 0;
  for (const PassedOver& r : d.better) {
    if (!force.admits(*r.kernel)) continue;
    text += words(separator, r.kernel->name, " (", r.reason, ")");
    separator = ", ";
    ++named;
  }
  if (!named) text += ": this build has no such kernel";
  d.status = {FFPA_NOT_SUPPORTED, std::move(text)};
  return d;
}

std::string explain(const Decision& d) {
  std::string text;
  if (d.status.code != FFPA_OK) text = words("error: ", d.status.text, "\n");
  if (d.kernel)
    text = words("kernel: ", d.kernel->name, "\nengine: ", engine_name(d.kernel->engine),
                 "\nworkspace: ", d.choice.workspace_bytes, " bytes\nsplits: ", d.choice.num_splits, "\n");
  for (const PassedOver& r : d.better) text += words("refused ", r.kernel->name, ": ", r.reason, "\n");
  return text;
}

std::string describe(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  std::string text = words(pass_name(p.pass), " ", dtype_name(f.q.dtype), " B ", p.n_seqs, ", H_q ", p.h_q, ", H_kv ",
                           p.h_kv, ", N_q ", p.n_q, ", N_kv ", p.n_kv, ", D_qk ", p.d_qk, ", D_v ", p.d_v);
  if (p.packed_q()) text += ", packed q";
  if (p.packed_kv()) text += ", packed k and v";
  if (p.paged()) text += words(", pages of ", p.page_rows);
  if (present(f.seqlens_kv)) text += ", seqlens_kv";
  if (f.causal) text += ", causal";
  if (p.has_window()) text += words(", window ", f.window_left, " ", f.window_right);
  if ((f.causal || p.has_window()) && f.anchor == FFPA_BOTTOM_RIGHT) text += ", bottom-right";
  if (f.softcap > 0) text += words(", softcap ", f.softcap);
  if (present(f.mask)) text += ", mask";
  if (present(f.bias)) text += ", bias";
  if (present(f.alibi_slopes)) text += ", alibi";
  if (present(f.sinks)) text += ", sinks";
  if (f.dropout_p > 0) text += words(", dropout ", f.dropout_p);
  if (f.deterministic) text += ", deterministic";
  if (f.batch_invariant) text += ", batch invariant";
  return text;
}

// ------------------------------------------------------------------------------------------------------------
// fingerprint

namespace {

class Hash {
 public:
  void add(uint64_t value) {  // the two halves of a 128-bit product, folded
    const auto product = static_cast<unsigned __int128>(state_ ^ value ^ 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    state_ = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  void add_signed(int64_t value) { add(static_cast<uint64_t>(value)); }
  void add(double value) { add(std::bit_cast<uint64_t>(value)); }
  void add(const ffpa_tensor& t) {
    add_signed(t.rank);
    if (!present(t)) return;
    add_signed(t.dtype);
    add_signed(t.device_type);
    add_signed(t.device_index);
    add(reinterpret_cast<uintptr_t>(t.data) % 16);
    for (int axis = 0; axis < t.rank; ++axis) {
      add_signed(t.extent[axis]);
      add_signed(t.stride[axis]);
    }
  }
  void add(std::string_view text) {
    add(uint64_t{text.size()});
    for (char c : text) add(static_cast<uint64_t>(static_cast<unsigned char>(c)));
  }
  uint64_t value() const { return state_ ? state_ : 1; }

 private:
  uint64_t state_ = 0x66667061;  // "ffpa"
};

}  // namespace

uint64_t fingerprint(const Problem& p) {
  const ffpa_forward_problem& f = p.fwd();
  Hash h;
  h.add_signed(static_cast<int64_t>(p.pass));
  backward_tensors(p.args, [&](const char*, const ffpa_tensor& t) { h.add(t); });
  for (double option : {p.scale, f.softcap, f.dropout_p}) h.add(option);
  for (int64_t option : {f.window_left, f.window_right, f.max_seqlen_q, f.max_seqlen_kv}) h.add_signed(option);
  for (int32_t option : {f.causal, f.anchor, f.deterministic, f.batch_invariant, f.num_splits, f.num_threads, f.engine})
    h.add_signed(option);
  h.add(std::string_view(f.kernel ? f.kernel : ""));
  return h.value();
}

// --------------------------------------------------------------------------------------------------------------------
// log

void log_plan(const Problem& p, uint64_t fingerprint, const Decision& d) {
  const char* wanted = std::getenv("FFPA_LOG");
  if (!wanted || std::strcmp(wanted, "1") != 0) return;
  static std::mutex mutex;
  static std::unordered_set<uint64_t> seen;
  const std::lock_guard lock(mutex);
  if (seen.size() >= 65536) seen.clear();  // bounds the memory of a process that never repeats a shape
  if (!seen.insert(fingerprint).second) return;
  std::string text = words("ffpa: ", describe(p), "\n");
  const std::string body = explain(d);
  for (std::string_view rest = body; !rest.empty();) {
    const size_t end = rest.find('\n');
    text += words("ffpa:   ", rest.substr(0, end), "\n");
    rest = rest.substr(end + 1);
  }
  std::fputs(text.c_str(), stderr);
}

}  // namespace ffpa
