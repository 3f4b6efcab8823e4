// SPDX-License-Identifier: Apache-2.0
// The umbrella header of serving/, the library on top of the core with the parts of an inference
// server: batches, pages of KV caches, scratch memory, scale to zero, usage and bills, and the
// choice of operators. Each header below also works alone. Link with the target gpushare::serving.
//
//   #include <gpushare/serving/all.hpp>
//   gpushare::batch_queue<request> waiting{{.max_size = 8, .max_delay = 2ms}};
#pragma once

#include <gpushare/serving/batch_queue.hpp>
#include <gpushare/serving/iteration_batch.hpp>
#include <gpushare/serving/iteration_options.hpp>
#include <gpushare/serving/leased_scratch.hpp>
#include <gpushare/serving/operator_selection.hpp>
#include <gpushare/serving/page_store.hpp>
#include <gpushare/serving/sleeping_tenant.hpp>
#include <gpushare/serving/usage_journal.hpp>
