// SPDX-License-Identifier: Apache-2.0
// Tags: alone
// NCCL as an engine, over the stand-in and doubles of NCCL's functions, which record their calls.
#include <gpushare/gradient/nccl.hpp>

#include <gpushare/backend/cuda/node.hpp>
#include <gpushare/config.hpp>

#if __has_include(<nccl.h>)

#include <gpushare/collective/collectives.hpp>
#include <gpushare/gradient/device_buckets.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/mismatch_suite.hpp"
#include "conformance/transport_suite.hpp"
#include "standins/cuda/launch.hpp"
#include "standins/cuda/session.hpp"
#include "support/catch.hpp"
#include "support/code_of.hpp"
#include "support/threads.hpp"

namespace gs = gpushare;
namespace cuda = gpushare::cuda;
using gs::errc;

struct ncclComm {
    int device = 0;
    ncclResult_t state = ncclSuccess;
    const gs::communicator* group = nullptr;  // of ranks that are threads: its collectives really happen
    int polls_left = 0;                       // of one that doesn't block, until it has enqueued
    std::function<void()> later{};            // what it enqueues then
};

namespace {

struct fake_nccl {
    ncclResult_t init = ncclSuccess, all_reduce = ncclSuccess, end = ncclSuccess;
    bool blocks = true;  // else calls return before anything is enqueued: ncclConfig_t::blocking
    int open_groups = 0, groups = 0, made = 0, destroyed = 0;
    std::atomic<int> aborted{0};  // by any rank's thread
    struct call {
        int device;
        std::size_t count;
        ncclDataType_t type;
        ncclRedOp_t op;
        cudaStream_t stream;
        bool in_group;
    };
    std::vector<call> calls{};
    std::atomic<int> data_calls{0};       // of groups, but for all-gathers
    std::function<void()> while_asked{};  // comes once, within ncclCommGetAsyncError

    void reset() {
        while_asked = nullptr;
        init = all_reduce = end = ncclSuccess;
        open_groups = groups = made = destroyed = 0;
        aborted = 0;
        calls.clear();
    }
};
fake_nccl& fake() {
    static fake_nccl instance;
    return instance;
}

/// What NCCL does on a device, by the thread that calls it, once the stream is there.
template <class Call>
ncclResult_t really(ncclComm_t comm, cudaStream_t stream, const Call& call) {
    if (cudaStreamSynchronize(stream) != cudaSuccess) return ncclUnhandledCudaError;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const gs::collective_fault f = call(comm->group->rank(static_cast<std::uint32_t>(comm->device)), until);
    return f ? ncclInternalError : ncclSuccess;
}
/// Calls f(a T, the operator).
template <class F>
gs::collective_fault of_type(ncclDataType_t type, ncclRedOp_t op, const F& f) {
    ++fake().data_calls;
    if (type == ncclFloat32) return op == ncclAvg ? f(float{}, gs::average{}) : f(float{}, gs::sum{});
    if (type == ncclBfloat16) return f(gs::bfloat16{}, gs::sum{});
    return f(std::int64_t{}, gs::sum{});
}
/// As a communicator that doesn't block: once it has been asked a few times how far it is.
void enqueue_later(ncclComm_t comm, cudaStream_t stream, const std::function<void()>& work) {
    comm->state = ncclInProgress;
    comm->polls_left = 3;
    comm->later = [=] {
        REQUIRE(cudaSetDevice(comm->device) == cudaSuccess);
        CHECK(standin::detail::launch(stream, std::chrono::milliseconds(1), work) == cudaSuccess);
    };
}
template <class T>
std::span<const T> input(const void* p, std::size_t n) {
    return {static_cast<const T*>(p), n};
}
template <class T>
std::span<T> output(void* p, std::size_t n) {
    return {static_cast<T*>(p), n};
}

}  // namespace

extern "C" {
const char* ncclGetErrorString(ncclResult_t) { return "a reason"; }
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int n, const int* devices) {
    if (fake().init != ncclSuccess) return fake().init;
    for (int i = 0; i < n; ++i) {
        comms[i] = new ncclComm{devices[i]};
        (void)cudaSetDevice(devices[i]);
        ++fake().made;
    }
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    delete comm;
    ++fake().destroyed;
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    delete comm;
    ++fake().aborted;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
    if (comm->later && --comm->polls_left <= 0) {
        std::exchange(comm->later, nullptr)();
        if (comm->state == ncclInProgress) comm->state = ncclSuccess;
    }
    *state = comm->state;
    if (fake().while_asked) std::exchange(fake().while_asked, nullptr)();
    return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
    ++fake().open_groups;
    ++fake().groups;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    --fake().open_groups;
    return fake().end;
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    if (comm->group != nullptr)
        return really(comm, stream, [&](const gs::member& me, gs::instant until) {
            return of_type(type, op, [&]<class T>(T, auto by) {
                return gs::try_all_reduce(me, input<T>(in, count), output<T>(out, count), by, until);
            });
        });
    fake().calls.push_back({comm->device, count, type, op, stream, fake().open_groups == 1});
    if (fake().blocks) return fake().all_reduce;
    enqueue_later(comm, stream, [=] {
        for (size_t i = 0; i < count && type == ncclFloat32; ++i)
            static_cast<float*>(out)[i] = 2 * static_cast<const float*>(in)[i];
    });
    return fake().all_reduce == ncclSuccess ? ncclInProgress : fake().all_reduce;
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    if (comm->group != nullptr)
        return really(comm, stream, [&](const gs::member& me, gs::instant until) {
            return of_type(type, op, [&]<class T>(T, auto by) {
                return gs::try_reduce_scatter(me, input<T>(in, count * me.size()), output<T>(out, count), by, until);
            });
        });
    fake().calls.push_back({comm->device, count, type, op, stream, false});
    return ncclSuccess;
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    if (comm->group != nullptr)
        return really(comm, stream, [&](const gs::member& me, gs::instant until) {
            return gs::try_all_gather(me, input<std::byte>(in, count), output<std::byte>(out, count * me.size()),
                                      until);
        });
    fake().calls.push_back({comm->device, count, type, ncclNumOps, stream, false});
    if (fake().blocks) return ncclSuccess;
    enqueue_later(comm, stream, [=] {  // all ranks have the same
        for (std::size_t r = 0; r < 3; ++r) std::memcpy(static_cast<std::byte*>(out) + r * count, in, count);
    });
    return ncclInProgress;
}
ncclResult_t ncclBroadcast(const void*, void* data, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    if (comm->group != nullptr)
        return really(comm, stream, [&](const gs::member& me, gs::instant until) {
            ++fake().data_calls;
            return gs::try_broadcast(me, output<std::byte>(data, count), static_cast<std::uint32_t>(root), until);
        });
    fake().calls.push_back({root, count, type, ncclNumOps, stream, false});
    (void)comm;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    *rank = comm->device;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    *count = comm->group != nullptr ? static_cast<int>(comm->group->size()) : 3;
    return ncclSuccess;
}
}

namespace {

struct fixture {
    const standin::session gpu{{.devices = 3}};
    cuda::node node;
    const std::vector<gs::device_id> devices{{2}, {0}};
    std::vector<cuda::stream> streams;
    std::vector<float> x = std::vector<float>(8);
    const std::vector<const float*> in{x.data(), x.data() + 4};
    const std::vector<float*> out{x.data(), x.data() + 4};

    fixture() {
        fake().reset();
        for (const auto d : devices) streams.push_back(node.make_stream(d));
    }
    template <class Op = gs::sum>
    errc all_reduce(gs::nccl_communicator& group, Op op = {}) {
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), group, in, out, 4, op);
    }
};

}  // namespace

TEST_CASE_METHOD(fixture, "an all-reduce by NCCL: one group of calls, each on its rank's stream", "[cuda][nccl]") {
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    {
        // docs/recipes.md has these two lines.
        gs::nccl_communicator group{node, devices};                                                              // 1
        auto code = gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), group, in, out, 4);  // 2
        CHECK(code == errc::none);
        int current = -1;
        CHECK(cudaGetDevice(&current) == cudaSuccess);
        CHECK(current == 1);
        CHECK(all_reduce(group, gs::average{}) == errc::none);
        REQUIRE(fake().calls.size() == 4);
        CHECK(fake().groups == 2);
        CHECK(fake().open_groups == 0);
        const auto& second = fake().calls[1];
        CHECK(second.device == 0);
        CHECK(second.count == 4);
        CHECK(second.type == ncclFloat32);
        CHECK(second.op == ncclSum);
        CHECK(second.stream == streams[1].native_handle());
        CHECK(second.in_group);
        CHECK(fake().calls[3].op == ncclAvg);
        CHECK_FALSE(gs::fault_of(group));
        const gs::nccl_communicator moved = std::move(group);
        CHECK(moved.size() == 2);
    }
    CHECK(fake().destroyed == 2);
}

TEST_CASE_METHOD(fixture, "a refusal of NCCL is typed", "[cuda][nccl]") {
    using support::code_of;
    CHECK(code_of([&] {
              gs::nccl_communicator{node, std::vector<gs::device_id>{{1}, {1}}};
          }) == errc::duplicate_device);
    CHECK(code_of([&] { gs::nccl_communicator{node, {}}; }) == errc::invalid_specification);
    CHECK(code_of([&] { gs::nccl_communicator{node, std::vector<gs::device_id>{{7}}}; }) == errc::no_device);
    fake().init = ncclSystemError;
    CHECK_THROWS_WITH((gs::nccl_communicator{node, devices}), "ncclCommInitAll: a reason (2)");
    CHECK(code_of([&] { gs::nccl_communicator{node, devices}; }) == errc::backend_failed);
    fake().init = ncclSuccess;
    gs::nccl_communicator group{node, devices};
    fake().all_reduce = ncclInvalidArgument;
    CHECK(all_reduce(group) == errc::invalid_specification);
    CHECK(fake().calls.size() == 1);  // no more after the first error
    CHECK(fake().open_groups == 0);   // but the group is ended
    fake().all_reduce = ncclSuccess;
    fake().end = ncclUnhandledCudaError;
    CHECK(all_reduce(group) == errc::backend_failed);
    CHECK(gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams).first(1), group, in, out, 4) ==
          errc::invalid_specification);
    CHECK(gs::to_errc(ncclRemoteError) == errc::aborted);
    CHECK(gs::to_errc(ncclInProgress) == errc::in_flight);
    static_assert(!gs::nccl_number<std::int16_t> && gs::nccl_number<gs::bfloat16>);
}

TEST_CASE_METHOD(fixture, "NCCL is an engine of buckets on devices, of gradients where they are", "[cuda][nccl]") {
    gs::nccl_communicator group{node, devices};
    gs::device_buckets<float> buckets(2);
    for (const std::size_t g : {0U, 2U}) buckets.add("", std::vector<float*>{out[0] + g, out[1] + g}, 2);
    const auto engine = [&](auto from, auto to, std::size_t n, auto op) {
        return gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), group, from, to, n, op);
    };
    const auto step = [&] {
        for (const std::uint32_t r : {0U, 1U})
            for (const std::uint32_t g : {0U, 1U}) CHECK(buckets.ready(r, g) == errc::none);
        return buckets.advance(std::span(streams), out, engine);
    };
    CHECK(step() == errc::none);
    REQUIRE(fake().calls.size() == 2);
    CHECK(fake().calls[1].count == 4);
    CHECK(fake().calls[1].op == ncclAvg);
    group.abort();
    CHECK(step() == errc::aborted);
    CHECK_FALSE(buckets.complete());
}

TEST_CASE_METHOD(fixture, "a rank that fails is named, and nothing is submitted after an abort", "[cuda][nccl]") {
    gs::nccl_communicator group{node, devices};
    REQUIRE(all_reduce(group) == errc::none);
    const std::uint32_t failing = 1;
    REQUIRE(group.submit(node.gangs(), devices, std::span(streams), gs::collective_kind::broadcast,
                         [&](std::uint32_t r, ncclComm_t comm, cudaStream_t) {
                             if (r == failing) comm->state = ncclRemoteError;  // as if it came to light later
                             return ncclSuccess;
                         }) == errc::none);
    CHECK(gs::fault_of(group) == gs::collective_fault{errc::aborted, gs::collective_kind::broadcast, failing, 2});
    group.abort();
    CHECK(fake().aborted == 2);
    CHECK(gs::fault_of(group).code == errc::aborted);
    CHECK(all_reduce(group) == errc::aborted);
    CHECK(fake().calls.size() == 2);
}

TEST_CASE_METHOD(fixture, "a rank of NCCL as a transport: each call on its stream, and waited for", "[cuda][nccl]") {
    const std::unique_ptr<ncclComm> comm(new ncclComm{1});  // stays its maker's
    gs::nccl_transport net(comm.get(), streams[0].native_handle(), gs::nccl_calls::trusted);
    CHECK(net.rank() == 1);
    CHECK(net.size() == 3);
    std::vector<float> part(3), whole(9);
    std::vector<std::uint64_t> words(5);
    const auto of = [](auto& floats) { return std::span<const float>(floats); };
    CHECK_FALSE(net.all_reduce(of(part), std::span(part), gs::average{}, gs::never));
    CHECK_FALSE(net.reduce_scatter(of(whole), std::span(part), gs::sum{}, gs::never));
    CHECK_FALSE(net.all_gather(of(part), std::span(whole), gs::never));
    CHECK_FALSE(net.broadcast(std::span(words), 2, gs::never));
    CHECK_FALSE(net.barrier(gs::never));
    CHECK(net.carried() == gs::bytes{12 + 36 + 12 + 40});
    REQUIRE(fake().calls.size() == 5);
    CHECK((fake().calls[0].op == ncclAvg && fake().calls[0].count == 3 && fake().calls[0].type == ncclFloat32));
    CHECK((fake().calls[1].op == ncclSum && fake().calls[1].count == 3));
    CHECK((fake().calls[2].count == 12 && fake().calls[2].type == ncclUint8));
    CHECK((fake().calls[3].count == 40 && fake().calls[3].device == 2));
    for (const auto& c : fake().calls) CHECK(c.stream == streams[0].native_handle());
    CHECK(net.all_reduce(of(whole), std::span(part), gs::sum{}, gs::never).code == errc::mismatch);
    CHECK(net.broadcast(std::span(words), 3, gs::never).code == errc::mismatch);
    CHECK(fake().calls.size() == 5);
}

TEST_CASE_METHOD(fixture, "a rank of NCCL ends at its deadline, by an abort and by an error, and stays so",
                 "[cuda][nccl]") {
    auto* const comm = new ncclComm{1};
    gs::nccl_transport net(comm, streams[0].native_handle(), gs::nccl_calls::trusted);
    errc expected = errc::deadline_exceeded;
    std::uint32_t named = 1;
    const auto never_ends = [&] {
        standin::hold(streams[0].native_handle());
        streams[0].enqueue(gs::ns{1});
    };
    SECTION("a deadline") { never_ends(); }
    SECTION("an abort") {
        never_ends();
        net.abort(2, errc::stopped);
        expected = errc::stopped;
        named = 2;
    }
    SECTION("an error that comes to light later") {
        never_ends();
        comm->state = ncclRemoteError;
        expected = errc::aborted;
    }
    SECTION("an error at once") {
        fake().all_reduce = ncclInvalidArgument;
        expected = errc::invalid_specification;
    }
    const auto soon = std::chrono::steady_clock::now() +
                      std::chrono::milliseconds(expected == errc::deadline_exceeded ? 20 : 300'000);
    const auto fault = net.all_reduce(std::span<const float>(x), std::span(x), gs::sum{}, soon);
    CHECK(fault.code == expected);
    CHECK(fault.rank == named);
    CHECK(fake().aborted == 1);
    CHECK(net.barrier(gs::never) == fault);
    CHECK(fake().calls.size() == 1);
    standin::let_go(streams[0].native_handle());
}

namespace {

/// Ranks of NCCL, each a thread with a device of its own.
struct nccl_threads {
    explicit nccl_threads(unsigned ranks) : group(ranks) {}
    template <class F>
    void each(const F& f) const {
        support::together(group.size(), [&](unsigned r) {
            if (cudaSetDevice(static_cast<int>(r)) != cudaSuccess) return;
            cudaStream_t stream = nullptr;
            if (cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0) != cudaSuccess) return;
            {
                // Whose call has failed has aborted it, which deletes it.
                auto* const comm = new ncclComm{static_cast<int>(r), ncclSuccess, &group};
                gs::nccl_transport net(comm, stream);
                f(net);
                if (!net.fault()) delete comm;
            }
            (void)cudaStreamDestroy(stream);
        });
    }
    gs::communicator group;
};

}  // namespace

TEST_CASE("ranks of NCCL are a transport", "[cuda][nccl]") {
    const standin::session gpu{{.devices = 3}};
    std::vector<std::string> wrong(3, "it didn't run");
    nccl_threads(3).each([&](gs::nccl_transport& net) { wrong[net.rank()] = conformance::check_transport(net); });
    for (const auto& w : wrong) CHECK(w == "");
}

TEST_CASE("ranks of NCCL that call different collectives all learn of the mismatch, and NCCL isn't called",
          "[cuda][nccl]") {
    using net_type = gs::nccl_transport;
    const standin::session gpu{{.devices = 3}};
    const auto ranks = GENERATE(2U, 3U);
    for (std::size_t k = 0; k < conformance::mismatches<net_type>().size(); ++k) {
        conformance::mismatch_buffers memory[3];
        std::vector<gs::collective_fault> faults(ranks), later(ranks);
        fake().data_calls = 0;
        nccl_threads(ranks).each([&](net_type& net) {
            const auto r = net.rank();
            const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
            faults[r] = conformance::mismatches<net_type>()[k].call(net, r + 1 == ranks, memory[r], until);
            later[r] = net.barrier(until);
        });
        CHECK(conformance::wrong_mismatch<net_type>(k, faults, later) == "");
        CHECK(fake().data_calls == 0);
        if (ranks == 3 && !conformance::mismatches<net_type>()[k].nobody_agrees) CHECK(faults[0].rank == 2);
    }
}

TEST_CASE_METHOD(fixture, "a communicator that doesn't block is waited for until it has enqueued", "[cuda][nccl]") {
    fake().blocks = false;
    std::vector<float> ins{1, 2, 3}, outs(3);
    SECTION("a transport has the result") {
        const std::unique_ptr<ncclComm> comm(new ncclComm{2});
        gs::nccl_transport net(comm.get(), streams[0].native_handle(), gs::nccl_calls::trusted);
        CHECK_FALSE(net.all_reduce(std::span<const float>(ins), std::span(outs), gs::sum{}, gs::never));
        CHECK(outs == std::vector<float>{2, 4, 6});
        CHECK_FALSE(net.barrier(gs::never));
    }
    SECTION("a transport compares the words of this call, not what was there before") {
        const std::unique_ptr<ncclComm> comm(new ncclComm{2});
        gs::nccl_transport net(comm.get(), streams[0].native_handle());
        for (int call = 0; call < 3; ++call) {
            CHECK_FALSE(net.all_reduce(std::span<const float>(ins), std::span(outs), gs::sum{}, gs::never));
            CHECK(outs == std::vector<float>{2, 4, 6});
            CHECK_FALSE(net.barrier(gs::never));
            outs.assign(3, 0);
        }
    }
    SECTION("a transport's deadline and abort end that, too") {
        auto* const comm = new ncclComm{2};
        gs::nccl_transport net(comm, streams[0].native_handle(), gs::nccl_calls::trusted);
        net.abort(0, errc::stopped);
        CHECK(net.all_reduce(std::span<const float>(ins), std::span(outs), gs::sum{}, gs::never).code == errc::stopped);
        CHECK(outs == std::vector<float>(3));
    }
    SECTION("points of the ranks' streams are behind it") {
        gs::nccl_communicator group{node, devices};
        const std::vector<const float*> from{ins.data(), ins.data()};
        std::vector<float> second(3);
        const std::vector<float*> to{outs.data(), second.data()};
        CHECK(gs::submit_all_reduce<float>(node.gangs(), devices, std::span(streams), group, from, to, 3) ==
              errc::none);
        for (auto& s : streams) CHECK(s.record().wait(gs::never));
        CHECK(outs == std::vector<float>{2, 4, 6});
        CHECK(second == outs);
    }
    SECTION("what fails on the way is told") {
        gs::nccl_communicator group{node, devices};
        fake().end = ncclSystemError;
        CHECK(all_reduce(group) == errc::backend_failed);
        fake().end = ncclInProgress;
        CHECK(all_reduce(group) == errc::none);
        CHECK_FALSE(gs::fault_of(group));
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE_METHOD(fixture, "a transport disturbs no capture, leaves no error, and has its word on its own device",
                 "[cuda][nccl]") {
    const std::unique_ptr<ncclComm> comm(new ncclComm{2});
    const auto used = standin::used(2);
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    std::optional<gs::nccl_transport> net;
    net.emplace(comm.get(), streams[0].native_handle(), gs::nccl_calls::trusted);
    CHECK(standin::used(2) > used);
    CHECK(standin::used(1) == gs::bytes{});
    int current = -1;
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK(current == 1);

    auto theirs = node.make_stream(gs::device_id{0});
    REQUIRE(cudaStreamBeginCapture(theirs.native_handle(), cudaStreamCaptureModeGlobal) == cudaSuccess);
    std::thread([&] {
        streams[0].enqueue(std::chrono::milliseconds(1));
        CHECK_FALSE(net->barrier(gs::never));
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        net.reset();
        net.emplace(comm.get(), streams[0].native_handle(), gs::nccl_calls::trusted);
    }).join();
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(theirs.native_handle(), &graph) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);

    const auto why = [&](cudaError_t code) {
        standin::inject({.call = "cudaMalloc", .code = code});
        return support::code_of([&] { gs::nccl_transport{comm.get(), streams[0].native_handle()}; });
    };
    CHECK(why(cudaErrorMemoryAllocation) == errc::out_of_memory);
    CHECK(why(cudaErrorIllegalAddress) == errc::device_lost);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE_METHOD(fixture, "an NCCL communicator may be aborted while others ask for its faults",
                 "[cuda][nccl][threads]") {
    gs::nccl_communicator group{node, devices};
    std::atomic<bool> aborted{false};
    std::thread asks([&] {
        while (!aborted) (void)group.fault();
    });
    std::thread submits([&] {
        while (all_reduce(group) != errc::aborted) std::this_thread::yield();
    });
    group.abort();
    aborted = true;
    asks.join();
    submits.join();
    CHECK(group.fault().code == errc::aborted);
    CHECK(fake().aborted == 2);
}

TEST_CASE_METHOD(fixture, "an NCCL communicator isn't aborted under somebody who asks for its faults",
                 "[cuda][nccl][threads]") {
    gs::nccl_communicator group{node, devices};
    std::thread aborts;
    int gone_meanwhile = -1;
    fake().while_asked = [&] {
        aborts = std::thread([&] { group.abort(); });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));  // more than it takes
        gone_meanwhile = fake().aborted;
    };
    CHECK(group.fault().code == errc::none);
    aborts.join();
    CHECK(gone_meanwhile == 0);
    CHECK(fake().aborted == 2);
}

TEST_CASE("NCCL's transport loses a device by the same errors as the backend", "[cuda][nccl]") {
    for (int n = 0; n < 1200; ++n) {
        const auto code = static_cast<cudaError_t>(n);
        CAPTURE(n);
        CHECK((gs::detail::errc_of_native(code) == errc::device_lost) == gs::cuda::is_sticky(code));
    }
}

TEST_CASE("a default stream is asked on its own device, whatever is current", "[cuda][nccl]") {
    standin::reset({.devices = 2, .time = standin::timing::manual});
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    for (const cudaStream_t by_default : {cudaStream_t{nullptr}, cudaStreamLegacy}) {
        const gs::detail::native_queue queue(by_default);
        (void)standin::detail::launch(by_default, std::chrono::milliseconds(10), [] {});
        for (const int current : {1, 0}) {
            REQUIRE(cudaSetDevice(current) == cudaSuccess);
            CHECK(queue.state() == cudaErrorNotReady);
            int still = -1;
            CHECK(cudaGetDevice(&still) == cudaSuccess);
            CHECK(still == current);
        }
        standin::advance(std::chrono::milliseconds(20));
        CHECK(queue.state() == cudaSuccess);
        REQUIRE(cudaSetDevice(1) == cudaSuccess);
    }
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    const std::string found = standin::take_findings();  // it notes all that is done to a default stream
    CAPTURE(found);
    CHECK(found.find("left behind") == std::string::npos);
}

TEST_CASE("making an NCCL communicator leaves the thread as it was", "[cuda][nccl]") {
    fake().reset();
    const standin::session gpu{{.devices = 3}};
    std::thread([] {
        const cuda::node node{{.devices = {2, 1}}};
        const std::vector<gs::device_id> devices{{0}, {1}};
        const gs::nccl_communicator group{node, devices};
        int device = -1;
        CHECK(cudaGetDevice(&device) == cudaSuccess);
        CHECK(device == 0);
        CHECK_FALSE(standin::has_context(0));  // which the node hasn't
    }).join();
}

TEST_CASE_METHOD(fixture, "into a capture NCCL is asked for all ranks, or not at all", "[cuda][nccl]") {
    gs::nccl_communicator group{node, devices};
    const cudaStream_t theirs[] = {streams[0].native_handle(), streams[1].native_handle()};
    std::vector<cuda::stream> own = std::move(streams);
    streams.clear();
    for (const auto s : theirs) streams.push_back(node.borrow(s));
    for (const std::size_t captured : {std::size_t{0}, std::size_t{1}}) {
        REQUIRE(cudaStreamBeginCapture(theirs[captured], cudaStreamCaptureModeThreadLocal) == cudaSuccess);
        const auto calls = fake().calls.size();
        CHECK(all_reduce(group) == (captured == 0 ? errc::capturing : errc::none));
        CHECK(fake().calls.size() == calls + 2 * captured);
    }
    for (const auto s : theirs) {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamEndCapture(s, &graph) == cudaSuccess);
        CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    }
}

TEST_CASE_METHOD(fixture, "NCCL's kernels and ours queue up on the devices that they share", "[cuda][nccl]") {
    gs::nccl_communicator group{node, devices};
    auto before = node.make_stream(devices[0]);
    cuda::point done;
    {
        auto entered = node.gangs().enter(devices);
        before.enqueue(gs::ns{1'000'000});
        done = before.record();
        entered.add(devices[0], 1, &before, done);
    }
    REQUIRE(all_reduce(group) == errc::none);
    const auto ended = streams[0].record();
    CHECK(ended.wait(gs::never));
    CHECK(done.reached());
}

#endif
