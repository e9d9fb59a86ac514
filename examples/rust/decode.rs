//! An inference engine's inner loop without Python: append a token's K and V to a paged cache, attend to all so far.
//! Build: rustc -O -L LIBDIR decode.rs. Every step is checked against plain loops. SPDX-License-Identifier: Apache-2.0
mod ffpa;
use ffpa::*;
use std::{alloc, ffi::CStr, mem::zeroed, ptr::null_mut};

const B: usize = 3; // sequences
const H_Q: usize = 8;
const H_KV: usize = 2;
const D: usize = 512;
const PAGE: usize = 16; // rows
const EACH: usize = 4; // pages of a sequence

fn check(status: i32) {
    assert!(status == 0, "{}", unsafe { CStr::from_ptr(ffpa_last_error()) }.to_string_lossy());
}

fn main() {
    let mut state = 1u64;
    let mut draw = |x: &mut [f32]| for y in x {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *y = (state >> 40) as f32 / 8388608.0 - 1.0;
    };
    let (mut q, mut o, mut k, mut v) = (vec![0f32; B * H_Q * D], vec![0f32; B * H_Q * D], vec![0.0; B * H_KV * D], vec![0.0; B * H_KV * D]);
    let (mut k_pages, mut v_pages) = (vec![f32::NAN; B * EACH * H_KV * PAGE * D], vec![f32::NAN; B * EACH * H_KV * PAGE * D]);
    let mut table: Vec<i32> = (0..B * EACH).map(|i| (i * 5 % (B * EACH)) as i32).collect(); // any order will do
    let (mut before, mut after) = ([0i32; B], [0i32; B]); // keys of each sequence before and after a step
    let mut seen: Vec<Vec<(Vec<f32>, Vec<f32>)>> = vec![vec![]; B * H_KV];
    let pages = [(B * EACH) as i64, H_KV as i64, PAGE as i64, D as i64];
    let (shape_q, shape_kv) = ([B as i64, H_Q as i64, 1, D as i64], [B as i64, H_KV as i64, 1, D as i64]);

    let (mut append, mut p, mut plan): (AppendProblem, ForwardProblem, Plan) = unsafe { zeroed() };
    unsafe { (ffpa_append_problem_init(&mut append), ffpa_forward_problem_init(&mut p)) };
    (append.k_new, append.v_new) = (Tensor::new(&mut k, FP32, &shape_kv), Tensor::new(&mut v, FP32, &shape_kv));
    (append.k_cache, append.v_cache) = (Tensor::new(&mut k_pages, FP32, &pages), Tensor::new(&mut v_pages, FP32, &pages));
    append.block_table = Tensor::new(&mut table, INT32, &[B as i64, EACH as i64]);
    append.seqlens_kv = Tensor::new(&mut before, INT32, &[B as i64]);
    (p.q, p.o) = (Tensor::new(&mut q, FP32, &shape_q), Tensor::new(&mut o, FP32, &shape_q));
    (p.k, p.v, p.block_table) = (append.k_cache, append.v_cache, append.block_table);
    p.seqlens_kv = Tensor::new(&mut after, INT32, &[B as i64]);
    check(unsafe { ffpa_forward_plan(&p, &mut plan) }); // once: lengths may change from run to run
    let workspace = unsafe { alloc::alloc(alloc::Layout::from_size_align(plan.workspace_bytes as usize + 1, 256).unwrap()) };

    let mut worst = 0f64;
    for step in 0..EACH * PAGE {
        (draw(&mut q), draw(&mut k), draw(&mut v), before.fill(step as i32), after.fill(step as i32 + 1));
        check(unsafe { ffpa_append(&append, null_mut()) });
        check(unsafe { ffpa_forward_run(&p, &plan, workspace.cast(), plan.workspace_bytes as usize, null_mut()) });
        (0..B * H_KV).for_each(|i| seen[i].push((k[i * D..][..D].to_vec(), v[i * D..][..D].to_vec())));
        for head in 0..B * H_Q {
            let (rows, q) = (&seen[head * H_KV / H_Q], &q[head * D..][..D]);
            let score = |k: &[f32]| q.iter().zip(k).map(|(a, b)| *a as f64 * *b as f64).sum::<f64>() / (D as f64).sqrt();
            let p: Vec<f64> = rows.iter().map(|(k, _)| score(k).exp()).collect();
            let mean = |d: usize| p.iter().zip(rows).map(|(p, (_, v))| p * v[d] as f64).sum::<f64>() / p.iter().sum::<f64>();
            (0..D).for_each(|d| worst = worst.max((mean(d) - o[head * D + d] as f64).abs()));
        }
    }
    println!("{} tokens of {B} sequences through pages {table:?}: largest difference {worst:.1e}", EACH * PAGE);
    assert!(worst < 1e-5);
}
