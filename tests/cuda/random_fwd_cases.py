"""220 random cases: python3 tests/cuda/random_fwd_cases.py | fwd_check. SPDX-License-Identifier: Apache-2.0"""

import random

random.seed(20261201)
out = []
for i in range(220):
    w = {}
    d = random.choice(
        [
            8,
            16,
            40,
            64,
            72,
            96,
            128,
            136,
            192,
            200,
            256,
            264,
            320,
            328,
            384,
            400,
            512,
            512,
            520,
            576,
            640,
            768,
            776,
            1000,
            1024,
        ]
    )
    w["d"] = d
    if random.random() < 0.2:
        w["dv"] = random.choice([8, 64, 128, 192, 256, 320, 512, 640, 1024])
    w["b"] = random.choice([1, 1, 2, 3, 5])
    hk = random.choice([1, 2, 3])
    w["hkv"] = hk
    w["h"] = hk * random.choice([1, 1, 2, 3, 8])
    w["n"] = random.choice([1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 200, 300, 515, 777])
    w["nkv"] = random.choice([1, 2, 63, 64, 65, 79, 81, 127, 128, 129, 177, 200, 300, 515, 777, 1100])
    if random.random() < 0.5:
        w["causal"] = 1
    if random.random() < 0.5:
        w["anchor"] = "br"
    if random.random() < 0.25:
        w["left"] = random.choice([0, 1, 30, 100, 300])
    if random.random() < 0.2:
        w["right"] = random.choice([0, 1, 30, 100, 300])
    m = random.random()
    if m < 0.25:
        w["packed"] = 1
    elif m < 0.4:
        w["lengths"] = 1
    elif m < 0.55:
        w["bnhd"] = 1
    if random.random() < 0.2:
        w["softcap"] = random.choice([0.5, 15, 50])
    if random.random() < 0.2:
        w["mask"] = random.choice(["1111", "0011", "1001", "0101", "0110", "0000", "0001"])
    if random.random() < 0.2:
        w["bias"] = random.choice(["1111", "0011", "1001", "0101", "0110", "0001"])
        if random.random() < 0.4:
            w["bias16"] = 1
        elif random.random() < 0.5:
            w["biasinf"] = random.choice([2, 3, 7])
    if random.random() < 0.2:
        w["alibi"] = 1
    if random.random() < 0.25:
        w["sinks"] = 1
    if random.random() < 0.2:
        w["dropout"] = random.choice([0.1, 0.5, 0.9, 1.0])
    if random.random() < 0.4:
        w["dtype"] = "fp16"
    if random.random() < 0.3:
        w["gain"] = random.choice([0.1, 4, 8])
    if random.random() < 0.1:
        w["scale"] = random.choice([0, -0.1, 1])
    if random.random() < 0.15:
        w["pattern"] = random.choice([1, 2, 3, 4, 6])
        w["scale"] = 1
    w["seed"] = i + 1
    w["rows"] = 64
    out.append(" ".join(f"{k}={v}" for k, v in w.items()))
print("\n".join(out))
