// SPDX-License-Identifier: Apache-2.0
// Data-parallel training of a libtorch module. During the backward pass, torch_gradients combines
// gradients with those of the other ranks, over any transport of gradient/. It does the work of
// torch's DistributedDataParallel, in five lines of a training loop:
//
//   // hooks on the parameters' gradients
//   gpushare::torch_gradients shared(model->named_parameters());
//   (void)shared.broadcast(net);  // all ranks begin with rank 0's parameters
//   std::jthread communicates([&] { (void)shared.communicate(net); });  // until a fault, or stop()
//   for (const auto& [x, y] : batches) {
//       optimiser.zero_grad();
//       loss(model->forward(x), y).backward();
//       if (auto fault = shared.step(optimiser)) ...                         // in place of optimiser.step(); names the rank
//   }
//   shared.stop();
//
// A program can tune the size of buckets while it trains, between step() and the next backward
// pass, when no other thread uses the transport: agree(net, took), tuner.step_took(took),
// shared.buckets().arrange(tuner.choice()), with a bucket_tuner. Parameters must be float32 in the
// host's memory. Needs libtorch 1.13, which Debian has, or later. The header is empty without
// libtorch.
//
// On CUDA the ranks are threads of this process. Each rank has a model on its device, or all models
// are on one device. Communication needs no thread: hooks enqueue the buckets on the ranks'
// streams.
//
//   std::vector<float*> none(2);       // gradients in one piece aren't packed: no staging
//   auto combine = [&](auto& all) { return all.advance(std::span(streams), none, engine); };
//   gpushare::torch_device_ranks both(node, std::span(streams), 2, combine);
//   gpushare::torch_gradients mine(model->named_parameters(), both, r);  // in rank r's scope
//   ...                                // the loop above
//   (void)mine.join(optimiser);        // the others may have more batches
//
// The engine is one of device_buckets (gradient/device_buckets.hpp). The ranks of several processes
// combine by the combiner() of a two_level_devices (gradient/two_level.hpp); each process must then
// have as many batches as the others. The processes compare what they have registered. Made for
// libtorch 2.11.
//
// Horovod's names (gradient/horovod.hpp) take tensors on the host. With a process_set of ranks on
// devices (gradient/horovod_devices.hpp), they take tensors on CUDA. Names that end in _ work in
// place:
//
//   gpushare::horovod::synchronize(gpushare::horovod::allreduce_async_(loss_of_epoch, "loss"));
//   at::Tensor all = gpushare::horovod::allgather(loss_of_epoch, "all");  // on CUDA alone
#pragma once

#if __has_include(<torch/csrc/autograd/variable.h>)

#include <ATen/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/detail/device_steps.hpp>
#include <gpushare/gradient/horovod.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a module's gradients travel between ranks. Gradients of one dimension, such as those of
/// norms and biases, are never rounded, however large they are.
struct torch_gradient_options {
    bucket_choice fusion{};                          ///< see gradient_buckets
    mixed_format wire{.large = wire_format::as_is};  ///< for example 16 bits for large gradients
    bool error_feedback = false;                     ///< see gradient_options
};

/// The types of gradients that ranks on devices combine: all or some of float, double, float16 and
/// bfloat16.
template <class... T>
struct gradient_types {};

/// How gradients on devices are combined.
struct torch_device_options {
    bytes bucket = bucket_choice{}.bucket;  ///< see gradient_buckets
    /// How long step() waits for the other ranks of this process; join() waits without a limit. A
    /// wait for other processes adds up to the combiner's patience.
    ns patience = ns::max();
};

/// The ranks of this process that train on CUDA devices, with a torch_gradients for each rank. Any
/// thread may call its functions. The object must outlive the torch_gradients, and the streams must
/// outlive the object.
///
/// `Node` is cuda::node. `combine` gets device_buckets of each type, calls their advance() on the
/// same streams, with an average, and returns the result of advance(). The thread that brings a
/// bucket's last gradient calls `combine`, unless another thread is already in `combine` and
/// continues there. In most cases these are autograd's threads. If `combine` fails, every rank's
/// step() says so, and the ranks' training is over.
template <class Node, class Combine, class... T>
class torch_device_ranks : public detail::device_steps<Node, Combine, T...> {
    using base = detail::device_steps<Node, Combine, T...>;

public:
    /// `streams` has a stream for each rank, which may be the stream on which the rank trains, or
    /// one stream for all ranks. Throws operation_error (errc::invalid_specification) for another
    /// number of streams.
    torch_device_ranks(Node& on, std::span<typename Node::stream> streams, std::uint32_t ranks, Combine combine,
                       const torch_device_options& options = {}, gradient_types<T...> = {})
        : base(on, streams, ranks, std::move(combine), options.bucket, options.patience) {}

    /// The name of the gradient for which a step waits, and the rank that lacks it; nothing if no
    /// step waits.
    using base::stalled;
};
/// Ranks with parameters of float.
template <class Node, class Stream, class Combine>
torch_device_ranks(Node&, std::span<Stream>, std::uint32_t, Combine) -> torch_device_ranks<Node, Combine, float>;
/// Ranks with parameters of float.
template <class Node, class Stream, class Combine>
torch_device_ranks(Node&, std::span<Stream>, std::uint32_t, Combine, torch_device_options)
    -> torch_device_ranks<Node, Combine, float>;
/// Ranks with parameters of these types.
template <class Node, class Stream, class Combine, class... T>
torch_device_ranks(Node&, std::span<Stream>, std::uint32_t, Combine, torch_device_options, gradient_types<T...>)
    -> torch_device_ranks<Node, Combine, T...>;

namespace detail {
// A template, because older releases have no getStreamNativeHandle.
template <class Guard>
[[nodiscard]] void* torch_stream(const Guard& guard, c10::Device on) {
    if constexpr (requires { guard.getStreamNativeHandle(guard.getStream(on)); })
        return guard.getStreamNativeHandle(guard.getStream(on));
    else
        raise({.code = errc::not_supported}, {}, "gradients on devices: this libtorch doesn't tell its current stream");
}
/// The calling thread's current stream.
[[nodiscard]] inline void* current_torch_stream(c10::Device on) {
    return torch_stream(*c10::impl::getDeviceGuardImpl(on.type()), on);
}
}  // namespace detail

/// One rank's parameters. The thread that trains calls all functions except communicate().
class torch_gradients {
public:
    /// `parameters` is the result of a module's named_parameters(), the same on all ranks.
    /// Parameters that need no gradient are left out. Every other parameter gets a gradient that
    /// keeps its place in memory. Throws operation_error (errc::not_supported), with the
    /// parameter's name, for a parameter that isn't of float32, dense and in the host's memory.
    template <class Named>
    explicit torch_gradients(const Named& parameters, const torch_gradient_options& options = {})
        : all_(std::make_shared<state>(options.fusion)) {
        register_all(parameters, [](const std::string& name, const at::Tensor& value) {
            if (value.scalar_type() != at::kFloat || !value.device().is_cpu() || !value.is_contiguous())
                raise({.code = errc::not_supported}, {},
                      name + ": a parameter that isn't of float32, dense, in the host's memory");
        });
        for (const parameter& p : all_->parameters) {
            const auto floats = floats_of(p.gradient);
            const auto wire = p.value.dim() > 1 ? options.wire.of(floats.size()) : wire_format::as_is;
            all_->buckets.add(p.name, floats, {wire, options.error_feedback});
        }
        hook_all();
    }

    /// Rank `rank` of `ranks`, whose parameters are on one CUDA device. Call this constructor on
    /// the stream on which the rank trains, which must not be a default stream. The other ranks may
    /// make their objects before or later, even in the same thread. The ranks must begin with the
    /// same parameters, so copy them.
    ///
    /// Throws operation_error, with the parameter's name: errc::not_supported for a parameter that
    /// isn't dense, on the first parameter's device and of a type that `ranks` combine;
    /// errc::mismatch if another rank has other parameters; and errc::invalid_specification for a
    /// rank that doesn't exist or was added before, and for a default stream. With other processes,
    /// the last rank here waits for these processes, and throws their fault: errc::mismatch, with
    /// the rank, if a process has other parameters, and errc::deadline_exceeded if a process is
    /// late.
    template <class Named>
    torch_gradients(const Named& parameters, detail::device_ranks& ranks, std::uint32_t rank)
        : all_(std::make_shared<state>(bucket_choice{})) {
        register_all(parameters, [&](const std::string& name, const at::Tensor& value) {
            const bool elsewhere = all_->on && *all_->on != value.device();
            all_->on = value.device();
            if (elsewhere || !value.is_cuda() || value.layout() != at::kStrided || !value.is_contiguous())
                raise({.code = errc::not_supported}, {},
                      name + ": a parameter that isn't dense, on the CUDA device of the others");
            (void)type_of(name, value);
        });
        std::vector<detail::device_gradient> mine;
        for (const parameter& p : all_->parameters)
            mine.push_back({p.name, type_of(p.name, p.value), p.gradient.data_ptr(),
                            static_cast<std::size_t>(p.gradient.numel())});
        all_->rank = rank;
        ranks.add(rank, std::move(mine), all_->stream());
        all_->devices = &ranks;
        hook_all();
    }

    torch_gradients(torch_gradients&&) noexcept = default;
    torch_gradients& operator=(torch_gradients&&) noexcept = default;

    /// All ranks get rank 0's parameters. All ranks call broadcast() before communicate(). Returns
    /// errc::not_supported on devices.
    template <host_transport Net>
    [[nodiscard]] collective_fault broadcast(Net& net, instant deadline = never) {
        if (all_->devices) return {.code = errc::not_supported};
        for (auto& p : all_->parameters)
            if (const auto f = net.broadcast(floats_of(p.value), 0, deadline)) return f;
        return {};
    }

    /// Combines the gradients of one step after another, until stop() (errc::stopped) or a fault.
    /// Call communicate() in a thread of its own. For `patience` see gradient_buckets::reduce. With
    /// several channels (bucket_choice::in_flight), each channel has a transport and a thread of
    /// its own. Returns errc::not_supported on devices.
    template <host_transport Net>
    collective_fault communicate(Net& net, ns patience = ns::max(), std::uint32_t channel = 0) {
        if (all_->devices) return {.code = errc::not_supported};
        for (;;)
            if (const auto f = all_->buckets.reduce(net, average{}, patience, channel)) return f;
    }

    /// While `on` is set, backward passes add up gradients, and gradients aren't combined before
    /// step().
    void hold(bool on) noexcept { all_->held = on; }

    /// Waits until the gradients are the averages over all ranks, and calls `optimiser.step()` if
    /// the averages are finite; all ranks decide alike. A parameter without a gradient counts with
    /// a gradient of 0.
    ///
    /// On devices the current stream waits for the averages, and the host waits until all ranks
    /// have enqueued their gradients. `optimiser.step()` is called whether the averages are finite
    /// or not. All ranks return the same fault: errc::deadline_exceeded with the late rank,
    /// errc::in_flight with a rank that ran two backward passes in a step without hold(), or the
    /// fault of `combine`.
    template <class Optimiser>
    [[nodiscard]] collective_fault step(Optimiser& optimiser) {
        for (std::uint32_t g = 0; g < all_->parameters.size(); ++g)
            if (!all_->parameters[g].ready) all_->arrived(g);
        for (auto& p : all_->parameters) p.ready = false;
        const auto f = all_->devices ? all_->devices->wait(all_->rank, all_->stream()) : all_->buckets.wait();
        if (!f && (all_->devices || all_->buckets.was_finite())) optimiser.step();
        return f;
    }

    /// For a rank without further batches, while other ranks may have more. The rank takes part in
    /// their steps with gradients of 0, until all ranks have joined. Averages remain averages over
    /// all ranks, as in torch's Join by default, and parameters remain the same on all ranks. A
    /// rank may continue training and join again afterwards, for example once for each epoch.
    /// Without devices, throws operation_error (errc::not_supported). Returns the fault of a step,
    /// if any.
    template <class Optimiser>
    [[nodiscard]] collective_fault join(Optimiser& optimiser) {
        if (!all_->devices) raise({.code = errc::not_supported}, {}, "joining without devices");
        while (all_->devices->another(all_->rank)) {
            for (auto& p : all_->parameters)
                if (!p.ready) p.value.mutable_grad() = at::Tensor();
            if (const auto f = step(optimiser)) return f;
        }
        return {};
    }

    /// Ends the training: communicate() returns. On devices every rank's step() returns
    /// errc::stopped from now on, even a step() that waits for other processes. The other processes
    /// finish the steps in which this process has taken part. Their later steps return
    /// errc::stopped as well, with this rank. Doesn't wait for the other processes. On devices any
    /// thread may call stop().
    void stop() {
        if (all_->devices) return all_->devices->end(errc::stopped, all_->rank);
        all_->buckets.stop();
    }

    /// The buckets, for their plan, their bytes on the wire, and missing gradients. Empty on
    /// devices.
    [[nodiscard]] gradient_buckets<>& buckets() noexcept { return all_->buckets; }

private:
    struct parameter {
        std::string name;
        at::Tensor value, gradient{};
        decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) accumulator{};
        bool ready = false;
    };
    struct state {
        explicit state(const bucket_choice& fusion) : buckets(fusion) {}
        gradient_buckets<> buckets;
        std::vector<parameter> parameters;
        bool held = false;
        detail::device_ranks* devices = nullptr;  // null if buckets are on the host
        std::uint32_t rank = 0;
        std::optional<c10::Device> on;

        /// Says that the parameter's gradient is complete. If the gradient is elsewhere, as after
        /// zero_grad(set_to_none), it is moved to its place.
        void arrived(std::uint32_t g) {
            parameter& p = parameters[g];
            at::Tensor& now = p.value.mutable_grad();
            if (!now.defined())
                p.gradient.zero_();
            else if (now.layout() != at::kStrided)
                refuse(p.name + ": a gradient that isn't dense");
            else if (now.data_ptr() != p.gradient.data_ptr())
                p.gradient.copy_(now.detach());
            now = p.gradient;
            p.ready = true;
            if (devices)
                devices->ready(rank, g, stream());
            else
                (void)buckets.ready(g);
        }
        /// The calling thread's current stream: in a hook the backward pass's stream, otherwise the
        /// training loop's.
        [[nodiscard]] void* stream() const {
            return detail::current_torch_stream(on.value_or(c10::Device(c10::DeviceType::CUDA, 0)));
        }
        [[noreturn]] void refuse(const std::string& why) const {
            if (devices) devices->end(errc::not_supported, rank);
            raise({.code = errc::not_supported}, {}, why);
        }
    };
    /// Runs after torch's node that adds up a parameter's gradient. A hook may outlive
    /// torch_gradients.
    struct hook final : torch::autograd::FunctionPostHook {
        hook(const std::shared_ptr<state>& of, std::uint32_t which) : all(of), g(which) {}
        torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                  const torch::autograd::variable_list&) override {
            if (const auto s = all.lock(); s && !s->held) s->arrived(g);
            return outputs;
        }
        std::weak_ptr<state> all;
        std::uint32_t g;
    };

    [[nodiscard]] static std::span<float> floats_of(const at::Tensor& t) {
        return {static_cast<float*>(t.data_ptr()), static_cast<std::size_t>(t.numel())};
    }
    [[nodiscard]] static detail::gradient_type type_of(const std::string& name, const at::Tensor& value) {
        switch (value.scalar_type()) {
            case at::kFloat: return detail::gradient_type::f32;
            case at::kDouble: return detail::gradient_type::f64;
            case at::kHalf: return detail::gradient_type::f16;
            case at::kBFloat16: return detail::gradient_type::bf16;
            default: raise({.code = errc::not_supported}, {}, name + ": a parameter of another type than floats");
        }
    }
    /// Gives each parameter its gradient. All gradients of a type are in one piece of memory, so
    /// that buckets needn't be packed.
    template <class Named, class Check>
    void register_all(const Named& parameters, const Check& check) {
        // numbers of elements, and memory
        std::map<at::ScalarType, std::pair<std::int64_t, at::Tensor>> pieces;
        for (const auto& p : parameters) {
            if (!p.value().requires_grad()) continue;
            check(p.key(), p.value());
            pieces[p.value().scalar_type()].first += p.value().numel();
            all_->parameters.push_back({p.key(), p.value()});
        }
        for (auto& [type, piece] : pieces)
            piece.second = at::zeros({std::exchange(piece.first, 0)}, all_->parameters[0].value.options().dtype(type));
        for (parameter& p : all_->parameters) {
            auto& [before, all] = pieces.at(p.value.scalar_type());
            // Detached, because an optimiser's zero_grad() refuses a gradient that torch knows as a
            // view.
            p.gradient = all.narrow(0, before, p.value.numel()).view_as(p.value).detach();
            before += p.value.numel();
            p.value.mutable_grad() = p.gradient;
        }
    }
    void hook_all() {
        for (std::uint32_t g = 0; g < all_->parameters.size(); ++g) {
            auto accumulator = torch::autograd::impl::grad_accumulator(all_->parameters[g].value);
            accumulator->add_post_hook(std::make_unique<hook>(all_, g));
            // Kept here, because the parameter itself doesn't keep its accumulator.
            all_->parameters[g].accumulator = std::move(accumulator);
        }
    }

    std::shared_ptr<state> all_;
};

namespace horovod {

namespace detail {
/// Calls f with the elements of a dense tensor in the host's memory. Throws operation_error
/// (errc::not_supported) for other tensors, and for types that can't be combined.
template <class F>
decltype(auto) with_elements(const at::Tensor& x, std::string_view name, const F& f) {
    const auto elements = [&]<class T>(T) {
        return std::span(static_cast<T*>(x.data_ptr()), static_cast<std::size_t>(x.numel()));
    };
    if (x.device().is_cpu() && x.is_contiguous()) switch (x.scalar_type()) {
            case at::kFloat: return f(elements(float{}));
            case at::kDouble: return f(elements(double{}));
            case at::kHalf: return f(elements(float16{}));
            case at::kBFloat16: return f(elements(bfloat16{}));
            case at::kLong: return f(elements(std::int64_t{}));
            default: break;
        }
    raise({.code = errc::not_supported}, {},
          std::string(name) + ": a tensor that isn't of floats or of int64, dense, in the host's memory");
}
/// A tensor's type as a number, equal on all ranks. If the type can be combined, it is the number
/// that spans have.
[[nodiscard]] inline std::uint32_t device_type_of(at::ScalarType type) {
    switch (type) {
        case at::kFloat: return gpushare::detail::type_id<float>();
        case at::kDouble: return gpushare::detail::type_id<double>();
        case at::kHalf: return gpushare::detail::type_id<float16>();
        case at::kBFloat16: return gpushare::detail::type_id<bfloat16>();
        case at::kLong: return gpushare::detail::type_id<std::int64_t>();
        // the type can be moved, but not combined
        default: return 1000U + static_cast<std::uint32_t>(type);
    }
}
/// A call for a tensor on a CUDA device, from the caller's current stream. With `by_rows`, the
/// number of rows may differ between ranks.
[[nodiscard]] inline device_call call_of(const at::Tensor& x, std::string_view name, collective_kind kind,
                                         bool by_rows = false) {
    if (!x.is_cuda() || x.layout() != at::kStrided || !x.is_contiguous())
        raise({.code = errc::not_supported}, {}, std::string(name) + ": a tensor that isn't dense, on a CUDA device");
    device_call c{.name = std::string(name), .kind = kind};
    c.type = device_type_of(x.scalar_type());
    c.element = static_cast<std::uint32_t>(x.element_size());
    c.data = x.data_ptr();
    c.count = static_cast<std::size_t>(x.numel());
    for (std::int64_t d = by_rows ? 1 : 0; d < x.dim(); ++d) {
        c.shape = gpushare::detail::mixed_word({c.shape, static_cast<std::uint64_t>(x.size(d))});
        if (by_rows) c.row *= static_cast<std::size_t>(x.size(d));
    }
    if (by_rows && (x.dim() == 0 || c.row == 0))
        raise({.code = errc::not_supported}, {}, std::string(name) + ": a tensor without rows");
    c.keeps = std::make_shared<const at::Tensor>(x);
    c.stream = gpushare::detail::current_torch_stream(x.device());
    c.current = [on = x.device()] { return gpushare::detail::current_torch_stream(on); };
    return c;
}
}  // namespace detail

/// A tensor that synchronize will return. Copies refer to the same tensor.
struct tensor_handle {
    handle of;                           ///< the collective
    std::shared_ptr<at::Tensor> result;  ///< complete after synchronize
    /// The rows from each rank, if they may differ.
    std::shared_ptr<std::vector<std::int64_t>> rows;
};
/// Whether the tensor is done, with or without success.
[[nodiscard]] inline bool poll(const tensor_handle& h) { return poll(h.of); }
/// Waits as for a handle, and returns the tensor.
[[nodiscard]] inline at::Tensor synchronize(const tensor_handle& h) {
    synchronize(h.of);
    return *h.result;
}

namespace detail {
/// Allocates the result on the stream with which the tensor was handed over, because an allocator
/// that reuses memory in the order of a stream knows no other stream.
[[nodiscard]] inline tensor_handle start_by_rows(process_set& of, device_call c, const at::Tensor& x) {
    tensor_handle made{{}, std::make_shared<at::Tensor>(), std::make_shared<std::vector<std::int64_t>>()};
    const c10::Stream on = c10::impl::getDeviceGuardImpl(x.device().type())->getStream(x.device());
    c.place = [made, on, options = x.options(), sizes = x.sizes().vec()](std::span<const std::uint64_t> rows) mutable {
        const c10::StreamGuard as_there(on);
        sizes[0] = 0;
        for (const std::uint64_t n : rows) {
            made.rows->push_back(static_cast<std::int64_t>(n));
            sizes[0] += static_cast<std::int64_t>(n);
        }
        *made.result = at::empty(sizes, options);
        return made.result->data_ptr();
    };
    made.of = of.start_on_device(std::move(c));
    return made;
}
}  // namespace detail

/// Hands over a tensor, to be combined in place. The tensor must stay in place until the handle is
/// done. Throws as for spans and for arrays on devices. Throws errc::not_supported unless the
/// tensor is of floats or int64, dense, and in the host's memory, or on CUDA if `of` is a set on
/// devices.
[[nodiscard]] inline handle allreduce_async_(const at::Tensor& x, std::string_view name, reduce_op op = Average,
                                             process_set& of = global_process_set()) {
    if (!x.is_cuda())
        return detail::with_elements(x, name, [&](auto all) { return allreduce_async(all, name, op, of); });
    auto c = detail::call_of(x, name, collective_kind::all_reduce);
    c.op = op;
    return of.start_on_device(std::move(c));
}
/// allreduce_async_ with a new tensor for the result. Keep the handle until the tensor is done.
[[nodiscard]] inline tensor_handle allreduce_async(const at::Tensor& x, std::string_view name, reduce_op op = Average,
                                                   process_set& of = global_process_set()) {
    auto result = std::make_shared<at::Tensor>(x.detach().clone(at::MemoryFormat::Contiguous));
    return {allreduce_async_(*result, name, op, of), result, nullptr};
}
/// All ranks get the tensor of rank `root`, in place. A tensor on CUDA may be of any type. Throws
/// as allreduce_async_ does.
[[nodiscard]] inline handle broadcast_async_(const at::Tensor& x, std::uint32_t root, std::string_view name,
                                             process_set& of = global_process_set()) {
    if (!x.is_cuda())
        return detail::with_elements(x, name, [&](auto all) { return broadcast_async(all, root, name, of); });
    auto c = detail::call_of(x, name, collective_kind::broadcast);
    c.root = root;
    return of.start_on_device(std::move(c));
}
/// broadcast_async_ with a new tensor for the result. Keep the handle until the tensor is done.
[[nodiscard]] inline tensor_handle broadcast_async(const at::Tensor& x, std::uint32_t root, std::string_view name,
                                                   process_set& of = global_process_set()) {
    auto result = std::make_shared<at::Tensor>(x.detach().clone(at::MemoryFormat::Contiguous));
    return {broadcast_async_(*result, root, name, of), result, nullptr};
}
/// Hands over several tensors, by the names `name.0`, `name.1` and so on. Tensors on CUDA are
/// handed over at once, so they are combined together. Throws as allreduce_async_ does.
[[nodiscard]] inline std::vector<handle> grouped_allreduce_async_(std::span<const at::Tensor> list,
                                                                  std::string_view name, reduce_op op = Average,
                                                                  process_set& of = global_process_set()) {
    std::vector<handle> all;
    std::vector<detail::device_call> calls;
    for (std::size_t k = 0; k < list.size(); ++k) {
        const std::string one = std::string(name) + "." + std::to_string(k);
        if (!of.on_devices()) {
            all.push_back(allreduce_async_(list[k], one, op, of));
            continue;
        }
        calls.push_back(detail::call_of(list[k], one, collective_kind::all_reduce));
        calls.back().op = op;
    }
    return of.on_devices() ? of.start_on_device(std::move(calls)) : all;
}
/// All ranks get the rows of each rank. Each rank may bring a different number of rows. Takes
/// tensors of any type on CUDA. For other tensors, and while a rank has joined, throws
/// errc::not_supported. Otherwise works as allreduce_async_.
[[nodiscard]] inline tensor_handle allgather_async(const at::Tensor& x, std::string_view name,
                                                   process_set& of = global_process_set()) {
    return detail::start_by_rows(of, detail::call_of(x, name, collective_kind::all_gather, true), x);
}
/// splits[q] rows go to rank q; without splits, all ranks get equally many rows. Otherwise works as
/// allgather_async.
[[nodiscard]] inline tensor_handle alltoall_async(const at::Tensor& x, at::IntArrayRef splits, std::string_view name,
                                                  process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::all_to_all, true);
    for (const std::int64_t n : splits) c.splits.push_back(static_cast<std::uint64_t>(n));
    const auto rows = static_cast<std::uint64_t>(x.size(0));
    if (splits.empty() && rows % of.size() != 0)
        raise({errc::invalid_specification, rows, 0, of.size(), reason::unequal_parts}, {}, "rows for all ranks");
    if (splits.empty()) c.splits.assign(of.size(), rows / of.size());
    return detail::start_by_rows(of, std::move(c), x);
}
/// Combines the ranks' tensors, which have one shape and a type that can be combined. Each rank
/// gets a part of the rows; if the number of ranks doesn't divide the rows, the first ranks get one
/// row more. Otherwise works as allgather_async.
[[nodiscard]] inline tensor_handle reducescatter_async(const at::Tensor& x, std::string_view name,
                                                       reduce_op op = Average, process_set& of = global_process_set()) {
    auto c = detail::call_of(x, name, collective_kind::reduce_scatter, true);
    c.op = op;
    return detail::start_by_rows(of, std::move(c), x);
}
/// Hands a tensor over, waits, and returns the result.
[[nodiscard]] inline at::Tensor allreduce(const at::Tensor& x, std::string_view name, reduce_op op = Average,
                                          process_set& of = global_process_set()) {
    return synchronize(allreduce_async(x, name, op, of));
}
/// Hands a tensor over, waits, and returns the result.
[[nodiscard]] inline at::Tensor allgather(const at::Tensor& x, std::string_view name,
                                          process_set& of = global_process_set()) {
    return synchronize(allgather_async(x, name, of));
}
/// Hands a tensor over, waits, and returns the result.
[[nodiscard]] inline at::Tensor reducescatter(const at::Tensor& x, std::string_view name, reduce_op op = Average,
                                              process_set& of = global_process_set()) {
    return synchronize(reducescatter_async(x, name, op, of));
}
/// All ranks get rank `root`'s parameters, the result of a module's named_parameters(). Waits for
/// the parameters. Throws what allreduce_async_ and synchronize throw.
template <class Named>
void broadcast_parameters(const Named& parameters, std::uint32_t root, process_set& of = global_process_set()) {
    std::vector<handle> all;
    for (const auto& p : parameters) all.push_back(broadcast_async_(p.value(), root, p.key(), of));
    synchronize(std::span<const handle>(all));
}

}  // namespace horovod

}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
