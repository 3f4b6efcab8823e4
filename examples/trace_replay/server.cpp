// SPDX-License-Identifier: Apache-2.0
#include "trace_replay/server.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace trace_replay {

namespace {

constexpr gpushare::bytes latent_bytes(std::uint32_t floats) { return gpushare::bytes{floats * sizeof(float)}; }

std::uint64_t mix(std::uint64_t x) {
    x ^= x >> 31;
    x *= 0x9e3779b97f4a7c15ULL;
    return x ^ x >> 29;
}

/// A kernel of a denoising step, in miniature: a small real computation whose result depends on all
/// earlier kernels.
struct denoise {
    float* x;
    std::uint32_t size;
    std::uint32_t number;
    std::uint64_t seed;

    void operator()(auto& ctx) const {
        const auto threads = ctx.num_blocks() * ctx.num_threads();
        for (auto i = ctx.block_rank() * ctx.num_threads() + ctx.thread_rank(); i < size; i += threads) {
            const auto noise = static_cast<float>(mix(seed + number * std::uint64_t{size} + i) >> 40) * 0x1p-24F - 0.5F;
            x[i] = number == 0 ? noise : 0.96F * x[i] + 0.04F * noise;
        }
    }
};

/// Computes nothing. Time passes as if the bytes went over the bus.
struct load_model {
    void operator()(auto&) const {}
};

// The rate from host to device over PCIe 4 x16, as servers measure it.
constexpr double load_bytes_per_second = 25e9;

}  // namespace

void server::step() {
    while (!running_.empty() && running_.front()->let_in.load(std::memory_order_acquire) &&
           running_.front()->end.reached()) {
        finish(*running_.front());
        running_.pop_front();
    }
    const auto expired = clock_.now() - keep_alive;
    for (auto m = residents_.begin(); m != residents_.end();) {
        const auto idle = m++;
        if (idle->users == 0 && idle->last_used < expired) evict(idle);
    }
    while (!waiting_.empty() && running_.size() < under_way) {
        const auto job = waiting_.front();
        const auto outcome = try_start(job);
        if (outcome == start::later) return;
        if (outcome == start::never) {
            (*records_)[job].refused = true;
            (*records_)[job].finished = clock_.now();
        }
        waiting_.pop_front();
    }
}

server::start server::try_start(std::size_t index) {
    const auto& j = workload_->jobs[index];
    auto r = std::make_unique<running>();
    r->job = index;
    if (!acquire(*r, j)) {
        release(*r);
        // Running jobs will free memory. If no job runs, all memory has been tried.
        return running_.empty() ? start::never : start::later;
    }
    submit(*r, j);
    running_.push_back(std::move(r));
    return start::started;
}

/// Memory for `size` bytes, if necessary after evicting idle models, the least recently used first.
/// Null if that isn't enough.
void* server::make_room(gpushare::bytes size) {
    for (;;) {
        if (void* p = access_->try_allocate(size)) return p;
        const auto idle = std::ranges::find(residents_, 0U, &resident::users);
        if (idle == residents_.end()) return nullptr;
        evict(idle);
    }
}

void server::evict(std::list<resident>::iterator idle) {
    access_->free(idle->memory, workload_->models[idle->model].size);
    residents_.erase(idle);
}

bool server::acquire(running& r, const job& j) {
    const auto& m = workload_->models[j.model];
    r.model = std::ranges::find(residents_, j.model, &resident::model);
    if (r.model == residents_.end()) {
        void* p = make_room(m.size);
        if (p == nullptr) return false;
        r.model = residents_.insert(residents_.end(), {.model = j.model, .memory = p});
        const double seconds = static_cast<double>(m.size.count()) / load_bytes_per_second / workload_->speedup;
        const gpushare::grid shape{.blocks = sms_, .hold = gpushare::ns(std::llround(seconds * 1e9))};
        access_->submit([shape](host::stream& s) { s.launch(shape, load_model{}); }, r.tickets);
    } else {
        residents_.splice(residents_.end(), residents_, r.model);
    }
    ++r.model->users;
    for (std::uint32_t i = 0; i < j.loras; ++i) {
        void* p = make_room(lora_size);
        if (p == nullptr) return false;
        r.loras.push_back(p);
    }
    r.latent = static_cast<float*>(make_room(latent_bytes(latent_size)));
    return r.latent != nullptr;
}

void server::release(running& r) {
    for (void* p : r.loras) access_->free(p, lora_size);
    if (r.latent != nullptr) access_->free(r.latent, latent_bytes(latent_size));
    if (r.model == residents_.end()) return;
    --r.model->users;
    r.model->last_used = clock_.now();
}

void server::submit(running& r, const job& j) {
    auto& record = (*records_)[r.job];
    r.read_back.resize(latent_size);
    record.submitted = clock_.now();
    const gpushare::grid shape{.blocks = sms_, .hold = j.kernel_time};
    const auto last = j.steps * j.kernels - 1;
    denoise kernel{.x = r.latent, .size = latent_size, .number = 0, .seed = mix(r.job + 1)};
    for (; kernel.number < last; ++kernel.number)
        access_->submit([shape, kernel](host::stream& s) { s.launch(shape, kernel); }, r.tickets);
    auto last_kernel = [=, &r, &record, clock = clock_](host::stream& s) {
        s.launch(shape, kernel);
        s.copy(r.read_back.data(), r.latent, latent_bytes(latent_size).count());
        r.end = s.record();
        record.let_in = clock.now();
        r.let_in.store(true, std::memory_order_release);
    };
    access_->submit(std::move(last_kernel), r.tickets);
}

void server::finish(running& r) {
    auto& record = (*records_)[r.job];
    record.failed = r.end.status() != gpushare::errc::none;
    for (const auto& t : r.tickets)  // the device is done with all of them
        record.failed |= !t.wait() || t.status() != gpushare::errc::none;
    record.done = !record.failed;
    record.finished = r.end.when();
    std::uint64_t checksum = 1;
    for (const float x : r.read_back) checksum = mix(checksum + std::bit_cast<std::uint32_t>(x));
    record.result = checksum;
    release(r);
}

void server::clear() {
    while (!residents_.empty()) evict(residents_.begin());
}

}  // namespace trace_replay
