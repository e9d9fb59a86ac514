/* Causal attention with grouped heads from plain C. SPDX-License-Identifier: Apache-2.0
 * Build: cc attention.c -lffpa -lm. Prints the first head's weights, checks all; exits with 1 if one is off. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ffpa/ffpa.h"

enum { HEADS_Q = 4, HEADS_KV = 2, N = 6, D = 64 };
static float q[HEADS_Q][N][D], k[HEADS_KV][N][D], v[HEADS_KV][N][N], o[HEADS_Q][N][N], lse[HEADS_Q][N];

static ffpa_tensor tensor(void* data, int64_t heads, int64_t rows, int64_t columns) {
  ffpa_tensor t = {0};
  t.data = data;
  t.dtype = FFPA_FP32;
  t.rank = 4;
  t.extent[0] = 1, t.extent[1] = heads, t.extent[2] = rows, t.extent[3] = columns;
  t.stride[0] = heads * rows * columns, t.stride[1] = rows * columns, t.stride[2] = columns, t.stride[3] = 1;
  return t;
}

int main(void) {
  ffpa_forward_problem p;
  ffpa_plan plan;
  void* workspace;
  double worst = 0;
  for (int i = 0; i < HEADS_Q * N * D; ++i) (&q[0][0][0])[i] = (float)sin(0.7 * i);
  for (int i = 0; i < HEADS_KV * N * D; ++i) (&k[0][0][0])[i] = (float)cos(1.3 * i);
  for (int h = 0; h < HEADS_KV; ++h)
    for (int j = 0; j < N; ++j) v[h][j][j] = 1; /* the identity: row i of o is row i's weights */

  ffpa_forward_problem_init(&p);
  p.q = tensor(q, HEADS_Q, N, D);
  p.k = tensor(k, HEADS_KV, N, D);
  p.v = tensor(v, HEADS_KV, N, N);
  p.o = tensor(o, HEADS_Q, N, N);
  p.lse = tensor(lse, HEADS_Q, N, 1);
  p.lse.rank = 3;
  p.lse.stride[1] = N, p.lse.stride[2] = 1;
  p.causal = 1;
  if (ffpa_forward_plan(&p, &plan) != FFPA_OK) return printf("plan: %s\n", ffpa_last_error()), 1;
  workspace = aligned_alloc(256, (plan.workspace_bytes + 255) / 256 * 256);
  if (ffpa_forward_run(&p, &plan, workspace, plan.workspace_bytes, NULL) != FFPA_OK)
    return printf("run: %s\n", ffpa_last_error()), 1;
  free(workspace);

  for (int h = 0; h < HEADS_Q; ++h)
    for (int i = 0; i < N; ++i)
      for (int j = 0; j < N; ++j) {
        double s = 0;
        for (int d = 0; d < D; ++d) s += q[h][i][d] * k[h / (HEADS_Q / HEADS_KV)][j][d] / sqrt(D);
        worst = fmax(worst, fabs(o[h][i][j] - (j <= i ? exp(s - lse[h][i]) : 0)));
        if (h == 0) printf(j < N - 1 ? "%.4f " : "%.4f\n", o[h][i][j]);
      }
  printf("largest difference from exp(q.k/sqrt(D) - lse): %.1e\n", worst);
  return worst < 1e-5 ? 0 : 1;
}
