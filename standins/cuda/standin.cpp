// SPDX-License-Identifier: Apache-2.0
// The functions with which tests control and observe the machine.
#include "standin.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "machine.hpp"

namespace standin {

namespace {

/// Calls f(machine&) under its mutex.
template <class F>
auto locked(F f) {
    auto& m = detail::the_machine();
    const std::lock_guard lock(m.mutex);
    return f(m);
}

/// Findings of earlier machines that no test has taken.
std::string& untaken() {
    static auto* const lines = new std::string;
    return *lines;
}

}  // namespace

void detail::check_at_exit() {
    const std::string left = untaken() + findings();
    if (left.empty()) return;
    std::fprintf(stderr, "CUDA stand-in, at exit:\n%s", left.c_str());
    std::fflush(nullptr);
    ::_exit(EXIT_FAILURE);
}

void reset(const options& o) {
    untaken() += findings();
    detail::restart(o);
}

ns now() {
    return locked([](auto& m) { return m.now(); });
}

void advance(ns step) {
    locked([&](auto& m) {
        m.run();  // a word that the host has opened was opened before this moment
        m.manual_now += step;
        m.run();
        m.changed.notify_all();
    });
}

void hold(cudaStream_t stream) {
    locked([&](auto& m) {
        m.run();  // does the work that is due
        const auto s = m.streams.find(stream);
        if (s == nullptr) return;
        s->held = true;
        if (!s->queue.empty()) s->queue.front().begun.reset();  // its first entry begins again
    });
}

void let_go(cudaStream_t stream) {
    locked([&](auto& m) {
        const auto s = m.streams.find(stream);
        if (s == nullptr || !s->held) return;
        s->held = false;
        s->idle_since = std::max(s->idle_since, m.now());
        m.run();
        m.changed.notify_all();
    });
}

void inject(fault f) {
    locked([&](auto& m) { m.faults.push_back(std::move(f)); });
}

void before_next(std::string call, std::function<void()> what) {
    locked([&](auto& m) { m.interruptions.emplace_back(std::move(call), std::move(what)); });
}

void poison(int device, cudaError_t code) {
    locked([&](auto& m) {
        m.run();
        m.poison(device, code);
    });
}

void unload() {
    detail::restart(detail::current_options());
    locked([](auto& m) { m.unloaded = true; });
}

bool rdma_capable(const void* p) {
    return locked([&](auto& m) {
        auto at = m.mapped.upper_bound(reinterpret_cast<std::uintptr_t>(p));
        return at != m.mapped.begin() && (--at)->second.of->rdma;
    });
}

std::size_t faults_left() {
    return locked([](auto& m) { return m.faults.size(); });
}

void hide_entry_point(std::string name) {
    locked([&](auto& m) { m.hidden.insert(std::move(name)); });
}

std::vector<call> calls() {
    return locked([](auto& m) {
        auto all = m.ring;
        if (m.logged > all.size() && !all.empty())
            std::ranges::rotate(all, all.begin() + static_cast<std::ptrdiff_t>(m.logged % all.size()));
        return all;
    });
}

std::uint64_t count(std::string_view name) {
    return locked([&](auto& m) {
        const auto at = m.counts.find(name);
        return at == m.counts.end() ? 0 : at->second;
    });
}

std::uint64_t count_all() {
    return locked([](auto& m) {
        std::uint64_t sum = 0;
        for (const auto& [name, n] : m.counts) sum += n;
        return sum;
    });
}

void forget_calls() {
    locked([](auto& m) {
        m.counts.clear();
        m.ring.clear();
        m.logged = 0;
    });
}

inventory existing() {
    return locked([](auto& m) {
        m.run();
        inventory all{.streams = m.streams.size(),
                      .events = m.events.size(),
                      .pools = m.pools.size() - m.devices.size(),  // each device has a default pool
                      .graphs = m.graphs.size(),
                      .executables = m.executables.size(),
                      .user_objects = m.user_objects_of_callers.size(),
                      .green_contexts = m.green_contexts.size(),
                      .address_ranges = m.reserved.size(),
                      .mappings = m.mapped.size(),
                      .pushed_contexts = m.pushed,
                      .captures = m.captures.size()};
        for (const auto& [at, b] : m.blocks)
            if (b.freed_on == 0 && !b.of_graph) ++(b.device < 0 ? all.host_allocations : all.allocations);
        for (const auto& [handle, p] : m.physicals.all()) all.physical_blocks += !p->released;
        return all;
    });
}

bool has_context(int device) {
    return locked([&](auto& m) { return m.device(device).active; });
}

void destroy_context_of(cudaStream_t stream) {
    locked([&](auto& m) {
        const auto s = m.streams.find(stream);
        if (s == nullptr || !s->in->green) return;
        s->in->destroyed = true;
        m.green_contexts.remove(s->in.get());
    });
}

std::set<std::uint32_t> sms_of(cudaStream_t stream) {
    return locked([&](auto& m) {
        const auto s = m.streams.find(stream);
        return s == nullptr ? std::set<std::uint32_t>{} : s->in->sms;
    });
}

bytes used(int device) {
    return locked([&](auto& m) {
        m.run();
        return bytes{m.used_memory(device)};
    });
}

std::string findings() {
    const inventory left = existing();
    return locked([&](auto& m) {
        std::string text;
        for (const auto& line : m.findings) text += line + "\n";
        const std::array<std::pair<std::size_t, const char*>, 14> kinds{{
            {left.streams, "streams"},
            {left.events, "events"},
            {left.pools, "memory pools"},
            {left.allocations, "allocations"},
            {left.host_allocations, "host allocations"},
            {left.graphs, "graphs"},
            {left.executables, "executable graphs"},
            {left.user_objects, "user objects"},
            {left.green_contexts, "green contexts"},
            {left.address_ranges, "address ranges"},
            {left.physical_blocks, "physical blocks"},
            {left.mappings, "mappings"},
            {left.pushed_contexts, "contexts pushed and not popped"},
            {left.captures, "captures"},
        }};
        for (const auto& [n, kind] : kinds)
            if (n != 0) text += "left behind: " + std::to_string(n) + " " + kind + "\n";
        return text;
    });
}

std::string take_findings() {
    std::string text = findings();
    detail::restart(detail::current_options());
    return text;
}

options detail::current_options() {
    return locked([](auto& m) { return m.chosen; });
}

}  // namespace standin
