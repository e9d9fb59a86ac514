# CUDA kernels, linked into libffpa with a static runtime. SPDX-License-Identifier: Apache-2.0
#
# A kernel joins by its line in one of these two lists. While both are empty no CUDA compiler is looked for.
set(ffpa_cuda_portable_sources  # src/kernels/sm80 and src/kernels/any: built for FFPA_CUDA_ARCHS
  src/kernels/any/bwd_delta.cu
  src/kernels/any/host.cu
)
set(ffpa_cuda_sm90_sources      # src/kernels/sm90: built for 90a
  src/kernels/sm90/bwd_host.cu
  src/kernels/sm90/fwd_host.cu
  src/kernels/sm90/host.cu
  src/kernels/sm90/sm90_bwd_dkdv.cu
  src/kernels/sm90/sm90_bwd_dkdv_bf16_128.cu
  src/kernels/sm90/sm90_bwd_dkdv_bf16_160.cu
  src/kernels/sm90/sm90_bwd_dkdv_bf16_192.cu
  src/kernels/sm90/sm90_bwd_dkdv_bf16_256.cu
  src/kernels/sm90/sm90_bwd_dkdv_bf16_64.cu
  src/kernels/sm90/sm90_bwd_dkdv_fp16_128.cu
  src/kernels/sm90/sm90_bwd_dkdv_fp16_160.cu
  src/kernels/sm90/sm90_bwd_dkdv_fp16_192.cu
  src/kernels/sm90/sm90_bwd_dkdv_fp16_256.cu
  src/kernels/sm90/sm90_bwd_dkdv_fp16_64.cu
  src/kernels/sm90/sm90_bwd_dq.cu
  src/kernels/sm90/sm90_bwd_dq_bf16_1.cu
  src/kernels/sm90/sm90_bwd_dq_bf16_2.cu
  src/kernels/sm90/sm90_bwd_dq_bf16_4.cu
  src/kernels/sm90/sm90_bwd_dq_fp16_1.cu
  src/kernels/sm90/sm90_bwd_dq_fp16_2.cu
  src/kernels/sm90/sm90_bwd_dq_fp16_4.cu
  src/kernels/sm90/sm90_fwd_cluster_dv.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_bf16_160.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_bf16_192.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_bf16_224.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_bf16_256.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_fp16_160.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_fp16_192.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_fp16_224.cu
  src/kernels/sm90/sm90_fwd_cluster_dv_fp16_256.cu
  src/kernels/sm90/sm90_fwd_quad_dv.cu
  src/kernels/sm90/sm90_fwd_quad_dv_bf16_160.cu
  src/kernels/sm90/sm90_fwd_quad_dv_bf16_192.cu
  src/kernels/sm90/sm90_fwd_quad_dv_bf16_256.cu
  src/kernels/sm90/sm90_fwd_quad_dv_fp16_160.cu
  src/kernels/sm90/sm90_fwd_quad_dv_fp16_192.cu
  src/kernels/sm90/sm90_fwd_quad_dv_fp16_256.cu
  src/kernels/sm90/sm90_fwd_single.cu
  src/kernels/sm90/sm90_fwd_single_bf16_128_128.cu
  src/kernels/sm90/sm90_fwd_single_bf16_192_128.cu
  src/kernels/sm90/sm90_fwd_single_bf16_192_192.cu
  src/kernels/sm90/sm90_fwd_single_bf16_256_256.cu
  src/kernels/sm90/sm90_fwd_single_bf16_64_64.cu
  src/kernels/sm90/sm90_fwd_single_fp16_128_128.cu
  src/kernels/sm90/sm90_fwd_single_fp16_192_128.cu
  src/kernels/sm90/sm90_fwd_single_fp16_192_192.cu
  src/kernels/sm90/sm90_fwd_single_fp16_256_256.cu
  src/kernels/sm90/sm90_fwd_single_fp16_64_64.cu
  src/kernels/sm90/tensor_maps.cu
)

if(NOT ffpa_cuda_portable_sources AND NOT ffpa_cuda_sm90_sources)
  return()
endif()
if(NOT FFPA_CUDA)
  return()
endif()

include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER)
  find_program(ffpa_nvcc nvcc HINTS /usr/local/cuda/bin)
  if(ffpa_nvcc)
    set(CMAKE_CUDA_COMPILER ${ffpa_nvcc} CACHE FILEPATH "")
  endif()
endif()
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(FFPA_CUDA STREQUAL "auto")
    message(STATUS "ffpa: no CUDA compiler found, built without CUDA kernels")
    return()
  endif()
  message(FATAL_ERROR "FFPA_CUDA=ON, but no CUDA compiler was found: put nvcc on PATH or set CMAKE_CUDA_COMPILER")
endif()
set(CMAKE_CUDA_ARCHITECTURES ${FFPA_CUDA_ARCHS})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
enable_language(CUDA)
foreach(kind IN ITEMS STANDARD EXTENSION)  # CMake 3.25 does not know that nvcc 13 has C++20
  if(NOT CMAKE_CUDA20_${kind}_COMPILE_OPTION)
    set(CMAKE_CUDA20_${kind}_COMPILE_OPTION -std=c++20)
  endif()
endforeach()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)

target_compile_definitions(ffpa_compile INTERFACE FFPA_WITH_CUDA)
target_link_libraries(ffpa_compile INTERFACE CUDA::cudart_static)
target_link_libraries(ffpa_link INTERFACE CUDA::cudart_static)

function(ffpa_add_cuda_objects name archs)
  if(ARGN)
    list(TRANSFORM ARGN PREPEND ${PROJECT_SOURCE_DIR}/)
    ffpa_add_objects(${name} SOURCES ${ARGN} OPTIONS --expt-relaxed-constexpr)
    set_target_properties(ffpa_${name} PROPERTIES CUDA_ARCHITECTURES "${archs}")
  endif()
endfunction()
ffpa_add_cuda_objects(cuda_portable "${FFPA_CUDA_ARCHS}" ${ffpa_cuda_portable_sources})
ffpa_add_cuda_objects(cuda_sm90 "90a-real" ${ffpa_cuda_sm90_sources})
