# SPDX-License-Identifier: Apache-2.0
# What runs the jobs of jobs.cu: the sources that test_compiled and bench_device share.
set(gpu_rig job_rig.cpp mutation.cpp batch_norm.cpp packing.cpp softmax.cpp joined.cpp)
list(TRANSFORM gpu_rig PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
