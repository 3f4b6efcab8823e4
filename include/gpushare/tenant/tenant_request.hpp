// SPDX-License-Identifier: Apache-2.0
// A request of a tenant: submissions that belong together, such as the steps of an inference. See
// compute/request.hpp for what it promises.
//
//   auto r = chat.request({.deadline = std::chrono::steady_clock::now() + 50ms, .level = {1}});
//   for (auto& layer : layers) r.submit([&](auto& s) { s.launch(shape, layer); }).wait();
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <gpushare/compute/policy.hpp>
#include <gpushare/compute/request.hpp>
#include <gpushare/compute/submission.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {

/// The request that tenant::request returns. Neither copied nor moved; for one thread at a time.
/// Ends before its tenant.
template <class Limiter>
class [[nodiscard]] tenant_request {
public:
    using stream = typename Limiter::stream;  ///< The stream that its submissions are enqueued on.

    /// Called by the tenant, to which the streams and the name belong.
    tenant_request(Limiter& limiter, client_id client, std::span<stream> streams, std::string_view name,
                   const request_options& options)
        : request_(limiter, client, options), streams_(streams), name_(name) {}

    /// As tenant::submit. The remaining time is the request's; so is the deadline, if it is earlier
    /// than the deadline of `o`.
    typename Limiter::ticket submit(submission_work<stream> work, const submit_options& o = {},
                                    submission_callback on_done = {}) {
        return try_submit(std::move(work), o, std::move(on_done)).value(name_, "submit");
    }
    /// As submit; the reason instead of an exception.
    [[nodiscard]] result<typename Limiter::ticket> try_submit(submission_work<stream> work,
                                                              const submit_options& o = {},
                                                              submission_callback on_done = {}) {
        if (o.stream >= streams_.size())
            return failure{errc::invalid_specification, o.stream, 0, streams_.size(), reason::no_such_stream};
        return request_.submit(streams_[o.stream], std::move(work), o, std::move(on_done));
    }

private:
    gpushare::request<Limiter> request_;
    std::span<stream> streams_;
    std::string_view name_;
};

}  // namespace GPUSHARE_ABI
}  // namespace gpushare
