// The functions of ffpa.h. No exception and no unworded failure leaves this file. SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <type_traits>

#include "api/devices.h"
#include "api/validate.h"
#include "core/words.h"
#include "dispatch/dispatch.h"

namespace ffpa {
namespace {

// A fixed buffer: setting it cannot fail, and a thread that never errs pays nothing.
thread_local char last_error[4096] = "";

ffpa_status report(ffpa_status code, const char* text) {
  std::strncpy(last_error, text, sizeof(last_error) - 1);
  return code;
}

ffpa_status report(const Status& status) {
  return status.code == FFPA_OK ? FFPA_OK : report(status.code, status.text.c_str());
}

// Runs a body that returns a Status; whatever it throws becomes one.
template <class Body>
ffpa_status guarded(Body&& body) {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report(FFPA_INTERNAL, "out of host memory");
  } catch (const std::exception& e) {
    return report(FFPA_INTERNAL, e.what());
  } catch (...) {
    return report(FFPA_INTERNAL, "unknown exception");
  }
}

constexpr Status ok() { return {}; }
template <class... Pieces>
Status invalid(const Pieces&... pieces) {
  return {FFPA_INVALID_ARGUMENT, words(pieces...)};
}

template <class Caller>
ffpa_status plan_pass(const Caller* caller, ffpa_plan* plan) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan: must not be null");
    *plan = ffpa_plan{};
    Problem problem;
    if (Status s = validate(caller, &problem); s.code != FFPA_OK) return s;
    const Decision d = decide(problem);
    if (d.status.code != FFPA_OK) return d.status;
    plan->struct_size = sizeof(ffpa_plan);
    plan->workspace_bytes = d.choice.workspace_bytes;
    plan->fingerprint = fingerprint(problem);
    plan->kernel = static_cast<int32_t>(d.kernel - kernel_table().data());
    plan->num_splits = d.choice.num_splits;
    plan->num_threads = d.choice.num_threads;
    log_plan(problem, plan->fingerprint, d);
    return ok();
  });
}

bool writes_nothing(const Problem& p) {
  const ffpa_backward_problem& b = p.args;
  if (p.pass == Pass::kForward) return !has_elements(b.forward.o) && !has_elements(b.forward.lse);
  return !has_elements(b.dq) && !has_elements(b.dk) && !has_elements(b.dv) && !has_elements(b.dbias) &&
         !has_elements(b.dsinks);
}

// Validates again: lengths and tables may have changed since the plan was made, and no kernel checks them.
template <class Caller>
ffpa_status run_pass(const Caller* caller, const ffpa_plan* plan, void* workspace, size_t workspace_bytes,
                     void* stream) {
  return guarded([&]() -> Status {
    if (!plan) return invalid("plan: must not be null");
    if (plan->struct_size != sizeof(ffpa_plan))
      return invalid("plan: must be filled by ffpa_forward_plan or ffpa_backward_plan, but its struct_size is ",
                     plan->struct_size);
    Problem problem;
    if (Status s = validate(caller, &problem); s.code != FFPA_OK) return s;
    if (plan->fingerprint != fingerprint(problem))
      return invalid(
          "plan: must have been made for this problem's extents, strides, dtypes, options and alignment, but its "
          "fingerprint differs (",
          describe(problem), ")");
    if (plan->kernel < 0 || plan->kernel >= static_cast<int32_t>(kernel_table().size()) ||
        kernel_table()[plan->kernel].pass != problem.pass)
      return invalid("plan: must be as ffpa_*_plan filled it, but its kernel is ", plan->kernel);
    if (plan->num_splits < 1 || plan->num_threads < 1)
      return invalid("plan: must be as ffpa_*_plan filled it, but has ", plan->num_splits, " splits and ",
                     plan->num_threads, " threads");
    if (workspace_bytes < plan->workspace_bytes)
      return {FFPA_WORKSPACE, words("workspace_bytes: must be at least the plan's, ", plan->workspace_bytes,
                                    ", but is ", workspace_bytes)};
    if (plan->workspace_bytes && !workspace)
      return {FFPA_WORKSPACE,
              words("workspace: must not be null, since the plan needs ", plan->workspace_bytes, " bytes")};
    if (plan->workspace_bytes && reinterpret_cast<uintptr_t>(workspace) % 256 != 0)
      return {FFPA_WORKSPACE, words("workspace: must be aligned to 256 bytes, but is off by ",
                                    reinterpret_cast<uintptr_t>(workspace) % 256)};
    if (writes_nothing(problem)) return ok();  // not left to loops over 2^31 empty heads
    const CurrentDevice current(problem.fwd().q);
    if (current.status().code != FFPA_OK) return current.status();
    const Choice choice{plan->workspace_bytes, plan->num_splits, plan->num_threads};
    return kernel_table()[plan->kernel].run(problem, choice, workspace, stream);
  });
}

template <class Caller>
size_t explain_pass(const Caller* caller, char* text, size_t bytes) {
  std::string words_of_it;
  const ffpa_status status = guarded([&]() -> Status {
    Problem problem;
    if (Status s = validate(caller, &problem); s.code != FFPA_OK) return s;
    words_of_it = explain(decide(problem));
    return ok();
  });
  const bool failed = status != FFPA_OK;
  const size_t prefix = failed ? 7 : 0;  // "error: "
  const char* body = failed ? last_error : words_of_it.c_str();
  const size_t length = prefix + std::strlen(body) + (failed ? 1 : 0);  // and a line end
  if (text && bytes) {
    size_t at = 0;
    const auto put = [&](const char* piece) {
      for (; *piece && at + 1 < bytes; ++piece) text[at++] = *piece;
    };
    if (failed) put("error: ");
    put(body);
    if (failed) put("\n");
    text[at] = 0;
  }
  return length + 1;
}

// Structs that the caller hands in to be filled say their own size, so that they can grow.
template <class Info>
Status check_info(const Info* info, const char* name) {
  if (!info) return invalid("info: must not be null");
  if (info->struct_size != sizeof(Info))
    return invalid("info: struct_size must be sizeof(", name, "), ", sizeof(Info), ", but is ", info->struct_size);
  return ok();
}

}  // namespace
}  // namespace ffpa

using namespace ffpa;

extern "C" {

const char* ffpa_last_error(void) { return last_error; }

const char* ffpa_status_name(ffpa_status status) {
  switch (status) {
    case FFPA_OK: return "FFPA_OK";
    case FFPA_INVALID_ARGUMENT: return "FFPA_INVALID_ARGUMENT";
    case FFPA_NOT_SUPPORTED: return "FFPA_NOT_SUPPORTED";
    case FFPA_WORKSPACE: return "FFPA_WORKSPACE";
    case FFPA_DEVICE_ERROR: return "FFPA_DEVICE_ERROR";
    case FFPA_INTERNAL: return "FFPA_INTERNAL";
  }
  return "unknown status";
}

int ffpa_version(void) { return FFPA_VERSION; }

void ffpa_forward_problem_init(ffpa_forward_problem* problem) {
  if (!problem) return;
  *problem = ffpa_forward_problem{};
  problem->struct_size = sizeof(*problem);
  problem->window_left = -1;
  problem->window_right = -1;
}

void ffpa_backward_problem_init(ffpa_backward_problem* problem) {
  if (!problem) return;
  *problem = ffpa_backward_problem{};
  problem->struct_size = sizeof(*problem);
  ffpa_forward_problem_init(&problem->forward);
}

void ffpa_append_problem_init(ffpa_append_problem* problem) {
  if (!problem) return;
  *problem = ffpa_append_problem{};
  problem->struct_size = sizeof(*problem);
}

ffpa_status ffpa_forward_plan(const ffpa_forward_problem* problem, ffpa_plan* plan) { return plan_pass(problem, plan); }
ffpa_status ffpa_backward_plan(const ffpa_backward_problem* problem, ffpa_plan* plan) {
  return plan_pass(problem, plan);
}

ffpa_status ffpa_forward_run(const ffpa_forward_problem* problem, const ffpa_plan* plan, void* workspace,
                             size_t workspace_bytes, void* stream) {
  return run_pass(problem, plan, workspace, workspace_bytes, stream);
}
ffpa_status ffpa_backward_run(const ffpa_backward_problem* problem, const ffpa_plan* plan, void* workspace,
                              size_t workspace_bytes, void* stream) {
  return run_pass(problem, plan, workspace, workspace_bytes, stream);
}

size_t ffpa_forward_explain(const ffpa_forward_problem* problem, char* text, size_t bytes) {
  return explain_pass(problem, text, bytes);
}
size_t ffpa_backward_explain(const ffpa_backward_problem* problem, char* text, size_t bytes) {
  return explain_pass(problem, text, bytes);
}

ffpa_status ffpa_append(const ffpa_append_problem* problem, void*) {
  return guarded([&]() -> Status {
    Append append;
    if (Status s = validate(problem, &append); s.code != FFPA_OK) return s;
    if (append.args.k_new.device_type != FFPA_CPU)
      return {FFPA_NOT_SUPPORTED,
              "k_new: must lie in cpu memory: this build appends there only, but it lies in cuda memory"};
    const ffpa_append_problem& p = append.args;
    if (has_elements(p.k_new) || has_elements(p.v_new) || has_elements(p.q)) append_cpu(append);
    return ok();
  });
}

int ffpa_kernel_count(void) { return static_cast<int>(kernel_table().size()); }

ffpa_status ffpa_kernel_at(int index, ffpa_kernel_info* info) {
  return guarded([&]() -> Status {
    if (Status s = check_info(info, "ffpa_kernel_info"); s.code != FFPA_OK) return s;
    if (index < 0 || index >= ffpa_kernel_count())
      return invalid("index: must be from 0 to ", ffpa_kernel_count() - 1, ", but is ", index);
    const Kernel& k = kernel_table()[index];
    *info = {sizeof(*info), k.name,  k.summary, static_cast<int32_t>(k.pass), k.engine, k.machine_lacks() == nullptr,
             k.dtypes,      k.min_d, k.max_d};
    return ok();
  });
}

int ffpa_device_count(ffpa_device_type type) { return device_count(type); }

ffpa_status ffpa_device_at(ffpa_device_type type, int index, ffpa_device_info* info) {
  return guarded([&]() -> Status {
    if (Status s = check_info(info, "ffpa_device_info"); s.code != FFPA_OK) return s;
    const int count = device_count(type);
    if (index < 0 || index >= count)
      return invalid("index: must be below the number of devices of that type, ", count, ", but is ", index);
    return device_at(type, index, info);
  });
}

}  // extern "C"
