/* ffpa.h is C99, and every function it declares links. SPDX-License-Identifier: Apache-2.0
 * Argument: the header's path; a function declared there and missing in the table below fails the test. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "ffpa/ffpa.h"

typedef void (*function)(void);
#define ENTRY(name) {#name, (function)name}
static const struct {
  const char* name;
  function address;
} table[] = {
    ENTRY(ffpa_last_error),
    ENTRY(ffpa_status_name),
    ENTRY(ffpa_version),
    ENTRY(ffpa_forward_problem_init),
    ENTRY(ffpa_backward_problem_init),
    ENTRY(ffpa_append_problem_init),
    ENTRY(ffpa_forward_plan),
    ENTRY(ffpa_backward_plan),
    ENTRY(ffpa_forward_run),
    ENTRY(ffpa_backward_run),
    ENTRY(ffpa_forward_explain),
    ENTRY(ffpa_backward_explain),
    ENTRY(ffpa_append),
    ENTRY(ffpa_kernel_count),
    ENTRY(ffpa_kernel_at),
    ENTRY(ffpa_device_count),
    ENTRY(ffpa_device_at),
};
enum { COUNT = sizeof table / sizeof table[0] };

static int failures = 0;
static void expect(int condition, const char* what) {
  if (!condition) {
    printf("FAILED: %s\n", what);
    ++failures;
  }
}

/* The function's name on a line that declares one: the last ffpa_ word before the first "(" after FFPA_API. */
static int declared_name(const char* line, char* name) {
  const char *start = NULL, *end, *at;
  if (strncmp(line, "FFPA_API ", 9) != 0 || !(end = strchr(line, '('))) return 0;
  for (at = line; (at = strstr(at, "ffpa_")) && at < end; ++at) start = at;
  if (!start) return 0;
  while (isalnum((unsigned char)*start) || *start == '_') *name++ = *start++;
  *name = 0;
  return 1;
}

int main(int argc, char** argv) {
  char line[512], name[512];
  int declared = 0, i;
  ffpa_kernel_info kernel;
  ffpa_device_info device;
  ffpa_forward_problem problem;
  ffpa_plan plan;
  FILE* header = argc > 1 ? fopen(argv[1], "r") : NULL;
  if (!header) return printf("FAILED: cannot open the header\n"), 1;
  while (fgets(line, sizeof line, header)) {
    if (!declared_name(line, name)) continue;
    ++declared;
    for (i = 0; i < COUNT && strcmp(table[i].name, name) != 0; ++i) continue;
    if (i == COUNT) printf("not in the table: %s\n", name), ++failures;
  }
  fclose(header);
  expect(declared == COUNT, "the table names each declared function once");
  for (i = 0; i < COUNT; ++i) expect(table[i].address != NULL, table[i].name);

  expect(ffpa_version() == FFPA_VERSION, "ffpa_version is the header's");
  expect(strcmp(ffpa_status_name(FFPA_WORKSPACE), "FFPA_WORKSPACE") == 0, "ffpa_status_name");
  expect(strcmp(ffpa_status_name((ffpa_status)99), "unknown status") == 0, "ffpa_status_name of another value");
  expect(strcmp(ffpa_last_error(), "") == 0, "no error yet");
  expect(ffpa_device_count(FFPA_CPU) == 1, "one CPU");
  expect(ffpa_device_count((ffpa_device_type)7) == 0, "no devices of an unknown type");
  device.struct_size = sizeof device;
  expect(ffpa_device_at(FFPA_CPU, 0, &device) == FFPA_OK && device.name[0] && device.processors > 0 &&
             device.memory_bytes > 0,
         "ffpa_device_at");
  expect(ffpa_kernel_count() > 0, "there are kernels");
  kernel.struct_size = sizeof kernel;
  for (i = 0; i < ffpa_kernel_count(); ++i)
    expect(ffpa_kernel_at(i, &kernel) == FFPA_OK && kernel.name[0] && kernel.summary[0] && kernel.dtypes,
           "ffpa_kernel_at");
  ffpa_forward_problem_init(&problem);
  expect(problem.struct_size == sizeof problem && problem.window_left == -1 && problem.window_right == -1, "init");
  expect(ffpa_forward_plan(&problem, &plan) == FFPA_INVALID_ARGUMENT, "an empty problem is refused");
  expect(strcmp(ffpa_last_error(), "q: must be given, but is absent") == 0, ffpa_last_error());
  printf("%d functions, %d failures\n", declared, failures);
  return failures != 0;
}
