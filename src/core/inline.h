// FFPA_INLINE: for functions in headers that are compiled several times with different instruction sets. Inlined always, they leave
// no shared symbol behind of which the linker could keep the copy that needs AVX-512. SPDX-License-Identifier: Apache-2.0
#pragma once

#define FFPA_INLINE [[gnu::always_inline]] inline
