// SPDX-License-Identifier: Apache-2.0
// The umbrella header of gradient/, the library on top of the core for data-parallel training:
// transports between ranks, buckets, formats on the wire, operators of groups, Horovod's names.
// Each header below also works alone. Link with the target gpushare::gradient.
//
// Include mpi.hpp, nccl.hpp and torch_gradients.hpp yourself: they need an MPI, NCCL and libtorch.
//
//   #include <gpushare/gradient/all.hpp>
//   gpushare::thread_transport net(group.rank(r));  // in rank r's thread
//   gpushare::gradient_buckets<> mine;
#pragma once

#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/compressed_link.hpp>
#include <gpushare/gradient/device_buckets.hpp>
#include <gpushare/gradient/group_operators.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/horovod_devices.hpp>
#include <gpushare/gradient/horovod_processes.hpp>
#include <gpushare/gradient/negotiation.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/two_level.hpp>
#include <gpushare/gradient/wire.hpp>
