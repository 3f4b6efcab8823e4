// SPDX-License-Identifier: Apache-2.0
// Data-parallel training of a libtorch module: combines gradients with the other ranks' while the
// backward pass goes on, over any transport of gradient/. It does the work of torch's
// DistributedDataParallel, in five lines of a training loop:
//
//   gpushare::torch_gradients shared(model->named_parameters());             // hooks on the parameters' gradients
//   (void)shared.broadcast(net);                                             // all ranks begin with rank 0's parameters
//   std::jthread communicates([&] { (void)shared.communicate(net); });       // until a fault, or stop()
//   for (const auto& [x, y] : batches) {
//       optimiser.zero_grad();
//       loss(model->forward(x), y).backward();
//       if (auto fault = shared.step(optimiser)) ...                         // in place of optimiser.step(); names the rank
//   }
//   shared.stop();
//
// The size of buckets is tuned on line between step() and the next backward pass, when no other
// thread uses the transport: agree(net, took), tuner.step_took(took),
// shared.buckets().arrange(tuner.choice()), with a bucket_tuner. Parameters of float32 in the
// host's memory. From the release that Debian has, 1.13, on. Empty where there is no libtorch.
//
// Tensors by Horovod's names (interop/horovod.hpp), in place:
//
//   gpushare::horovod::synchronize(gpushare::horovod::allreduce_async_(loss_of_epoch, "loss"));
#pragma once

#if __has_include(<torch/csrc/autograd/variable.h>)

#include <ATen/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/collective/reduce_ops.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/bucket_plan.hpp>
#include <gpushare/gradient/buckets.hpp>
#include <gpushare/gradient/transport.hpp>
#include <gpushare/gradient/wire.hpp>
#include <gpushare/interop/horovod.hpp>
#include <gpushare/numbers.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// How a module's gradients travel. Those of one dimension, such as norms' and biases', stay as
/// they are, however large.
struct torch_gradient_options {
    bucket_choice fusion{};                          ///< see gradient_buckets
    mixed_format wire{.large = wire_format::as_is};  ///< 16 bits for large ones of several dimensions, say
    bool error_feedback = false;                     ///< see gradient_options
};

/// One rank's parameters. Its functions are called by the thread that trains, but for communicate().
class torch_gradients {
public:
    /// `parameters`: the result of a module's named_parameters(), on all ranks alike. Parameters
    /// that need no gradient are left out. Each gets a gradient that stays where it is. Throws
    /// operation_error (errc::not_supported), with its name, for one that isn't of float32, dense
    /// and in the host's memory.
    template <class Named>
    explicit torch_gradients(const Named& parameters, const torch_gradient_options& options = {})
        : all_(std::make_shared<state>(options.fusion)) {
        std::int64_t elements = 0;
        for (const auto& p : parameters) {
            if (!p.value().requires_grad()) continue;
            check(p.key(), p.value());
            elements += p.value().numel();
        }
        // All gradients in one piece of memory, so that buckets needn't be packed.
        const at::Tensor all = at::zeros({elements}, at::kFloat);
        elements = 0;
        for (const auto& p : parameters) {
            if (!p.value().requires_grad()) continue;
            // Detached: an optimiser's zero_grad() refuses a gradient that torch knows as a view.
            add(p.key(), p.value(), all.narrow(0, elements, p.value().numel()).view_as(p.value()).detach(), options);
            elements += p.value().numel();
        }
        for (std::uint32_t g = 0; g < all_->parameters.size(); ++g) {
            auto accumulator = torch::autograd::impl::grad_accumulator(all_->parameters[g].value);
            accumulator->add_post_hook(std::make_unique<hook>(all_, g));
            all_->parameters[g].accumulator = std::move(accumulator);  // the parameter itself doesn't keep it
        }
    }

    torch_gradients(torch_gradients&&) noexcept = default;
    torch_gradients& operator=(torch_gradients&&) noexcept = default;

    /// All ranks get rank 0's parameters. Called by all, before communicate().
    template <host_transport Net>
    [[nodiscard]] collective_fault broadcast(Net& net, instant deadline = never) {
        for (auto& p : all_->parameters)
            if (const auto f = net.broadcast(floats_of(p.value), 0, deadline)) return f;
        return {};
    }

    /// Combines the gradients of one step after another, until stop() (errc::stopped) or a fault.
    /// Call it in a thread that does nothing else. `patience`: with other ranks, see
    /// gradient_buckets::reduce. With several channels (bucket_choice::in_flight), each has a
    /// transport and a thread of its own.
    template <host_transport Net>
    collective_fault communicate(Net& net, ns patience = ns::max(), std::uint32_t channel = 0) {
        for (;;)
            if (const auto f = all_->buckets.reduce(net, average{}, patience, channel)) return f;
    }

    /// While on, backward passes add up, and nothing is combined before step().
    void hold(bool on) noexcept { all_->held = on; }

    /// Waits until the gradients are the average of all ranks', and then calls `optimiser.step()`,
    /// if they are finite: the same answer on all ranks. A parameter that the backward pass didn't
    /// reach counts as one with a gradient of 0.
    template <class Optimiser>
    [[nodiscard]] collective_fault step(Optimiser& optimiser) {
        for (std::uint32_t g = 0; g < all_->parameters.size(); ++g)
            if (!all_->parameters[g].ready) all_->arrived(g);
        for (auto& p : all_->parameters) p.ready = false;
        const auto f = all_->buckets.wait();
        if (!f && all_->buckets.was_finite()) optimiser.step();
        return f;
    }

    /// No further step comes: communicate() returns.
    void stop() { all_->buckets.stop(); }

    /// For their plan, what they take on the wire, and which of them is waited for.
    [[nodiscard]] gradient_buckets<>& buckets() noexcept { return all_->buckets; }

private:
    struct parameter {
        at::Tensor value, gradient;
        decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>())) accumulator{};
        bool ready = false;
    };
    struct state {
        explicit state(const bucket_choice& fusion) : buckets(fusion) {}
        gradient_buckets<> buckets;
        std::vector<parameter> parameters;
        bool held = false;

        /// The parameter's gradient is complete. If it lies elsewhere, as behind zero_grad(set_to_none), it moves.
        void arrived(std::uint32_t g) {
            parameter& p = parameters[g];
            at::Tensor& now = p.value.mutable_grad();
            if (!now.defined())
                p.gradient.zero_();
            else if (now.data_ptr() != p.gradient.data_ptr())
                p.gradient.copy_(now.detach());
            now = p.gradient;
            p.ready = true;
            (void)buckets.ready(g);
        }
    };
    /// Behind torch's node that adds up a parameter's gradient. It may outlive us.
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
    static void check(const std::string& name, const at::Tensor& value) {
        if (value.scalar_type() != at::kFloat || !value.device().is_cpu() || !value.is_contiguous())
            raise({.code = errc::not_supported}, {},
                  name + ": a parameter that isn't of float32, dense, in the host's memory");
    }
    void add(const std::string& name, const at::Tensor& value, at::Tensor gradient,
             const torch_gradient_options& options) {
        value.mutable_grad() = gradient;
        const auto floats = floats_of(gradient);
        const auto wire = value.dim() > 1 ? options.wire.of(floats.size()) : wire_format::as_is;
        all_->buckets.add(name, floats, {wire, options.error_feedback});
        all_->parameters.push_back({value, std::move(gradient)});
    }

    std::shared_ptr<state> all_;
};

namespace horovod {

namespace detail {
/// Calls f with the elements of a dense tensor in the host's memory. Throws operation_error
/// (errc::not_supported) for another one, and for types that can't be combined.
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
}  // namespace detail

/// Hands a tensor over, in place: it stays until the handle is done. Throws as for spans, and
/// errc::not_supported for a tensor that isn't of floats or of int64, dense, in the host's memory.
[[nodiscard]] inline handle allreduce_async_(const at::Tensor& x, std::string_view name, reduce_op op = Average,
                                             process_set& of = global_process_set()) {
    return detail::with_elements(x, name, [&](auto all) { return allreduce_async(all, name, op, of); });
}
/// All ranks get the tensor of rank `root`, in place. Throws as allreduce_async_.
[[nodiscard]] inline handle broadcast_async_(const at::Tensor& x, std::uint32_t root, std::string_view name,
                                             process_set& of = global_process_set()) {
    return detail::with_elements(x, name, [&](auto all) { return broadcast_async(all, root, name, of); });
}
/// Several tensors, by the names `name.0`, `name.1` and so on. Throws as allreduce_async_.
[[nodiscard]] inline std::vector<handle> grouped_allreduce_async_(std::span<const at::Tensor> list,
                                                                  std::string_view name, reduce_op op = Average,
                                                                  process_set& of = global_process_set()) {
    std::vector<handle> all;
    for (std::size_t k = 0; k < list.size(); ++k)
        all.push_back(allreduce_async_(list[k], std::string(name) + "." + std::to_string(k), op, of));
    return all;
}
/// All ranks get rank `root`'s parameters, the result of a module's named_parameters(), and wait
/// for them. Throws as allreduce_async_, and what synchronize throws.
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
