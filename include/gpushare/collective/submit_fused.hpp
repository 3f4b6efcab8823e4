// SPDX-License-Identifier: Apache-2.0
// Fused all-reduces on the devices' streams: submit() of submit.hpp for the pipelines of fused_all_reduce.hpp, one of each
// rank, which differ in the memory that they point to alone.
//
//   std::vector<decltype(finish(0))> steps;       // finish(r): gs::reduced(x[r], width) | gs::rms_norm(weight[r], 1e-6F)
//   auto code = gpushare::submit_run(node.gangs(), devices, streams, members, std::span(std::as_const(steps)), outs);
#pragma once

#include <concepts>
#include <cstddef>
#include <span>

#include <gpushare/collective/communicator.hpp>
#include <gpushare/collective/fused_all_reduce.hpp>
#include <gpushare/collective/submit.hpp>
#include <gpushare/collective/submit_shared.hpp>
#include <gpushare/concepts.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

namespace detail {

/// Hands `submit` a function that makes the body of each rank.
template <bool Sharded, class Submit, class T, class Op, class... Stages>
[[nodiscard]] errc submit_pipelines(std::span<const member> members, std::span<const pipeline<T, Op, Stages...>> steps,
                                    std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                    const Submit& submit) {
    static_assert(!std::integral<T> && !std::same_as<T, double>, "gpushare: epilogues compute in float");
    if (members.empty() || steps.size() != members.size() || outs.size() != members.size())
        return errc::invalid_specification;
    const std::size_t slot = members[0].view().slot;
    for (const auto& p : steps) {
        if (p.width == 0 || p.count % p.width != 0) return errc::invalid_specification;
        if (epilogue<Stages...>::whole_rows && p.width * sizeof(float) > slot) return errc::invalid_specification;
    }
    return submit([&](std::size_t r) {
        const auto& p = steps[r];
        const fused_plan plan = members[0].tuning().fused(members[0].size(), p.count * sizeof(T));
        return fused_body<T, Op, Sharded, Stages...>{p, outs[r], plan};
    });
}

}  // namespace detail

/// Launches steps[r] for rank r on streams[r], with the whole result to outs[r]. As submit() in all else, and besides:
///   invalid_specification   elements that aren't whole rows; a stage that needs whole rows, of more floats than fit into a slot
///                           of the communicator
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_run(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                              std::span<const member> members, std::span<const pipeline<T, Op, Stages...>> steps,
                              std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                              const launch_options& options = {}) {
    return detail::submit_pipelines<false>(members, steps, outs, [&](const auto& body_of) {
        return detail::submit_each(gangs, devices, streams, members, body_of, options);
    });
}

/// The same where rank r keeps its own rows (`shard_of`) in outs[r].
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_run_sharded(Gangs& gangs, std::span<const device_id> devices, std::span<Stream> streams,
                                      std::span<const member> members,
                                      std::span<const pipeline<T, Op, Stages...>> steps,
                                      std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                      const launch_options& options = {}) {
    return detail::submit_pipelines<true>(members, steps, outs, [&](const auto& body_of) {
        return detail::submit_each(gangs, devices, streams, members, body_of, options);
    });
}

/// The same for ranks that share `device`: one launch on `stream` for all of them. As submit_shared() in all else.
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_shared_run(Gangs& gangs, device_id device, Stream& stream, std::span<const member> members,
                                     std::span<const pipeline<T, Op, Stages...>> steps,
                                     std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                     const launch_options& options = {}) {
    return detail::submit_pipelines<false>(members, steps, outs, [&](const auto& body_of) {
        return detail::submit_shared_each(gangs, device, stream, members, body_of, options);
    });
}

/// The same where rank r keeps its own rows (`shard_of`) in outs[r].
template <gang_order Gangs, launcher Stream, class T, class Op, class... Stages>
[[nodiscard]] errc submit_shared_run_sharded(Gangs& gangs, device_id device, Stream& stream,
                                             std::span<const member> members,
                                             std::span<const pipeline<T, Op, Stages...>> steps,
                                             std::span<typename pipeline<T, Op, Stages...>::out_type* const> outs,
                                             const launch_options& options = {}) {
    return detail::submit_pipelines<true>(members, steps, outs, [&](const auto& body_of) {
        return detail::submit_shared_each(gangs, device, stream, members, body_of, options);
    });
}

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
