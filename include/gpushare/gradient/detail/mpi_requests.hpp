// SPDX-License-Identifier: Apache-2.0
// The calls under way over an MPI, and a single test for the requests of all calls.
#pragma once

#if __has_include(<mpi.h>)

#include <mpi.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include <gpushare/collective/fault.hpp>
#include <gpushare/config.hpp>
#include <gpushare/error.hpp>
#include <gpushare/gradient/detail/mpi_pace.hpp>
#include <gpushare/gradient/detail/mpi_transfer.hpp>
#include <gpushare/units.hpp>

namespace gpushare {
inline namespace GPUSHARE_ABI {
namespace detail {

/// One call, which begins its transfers a few at a time.
struct mpi_job {
    collective_kind what = collective_kind::none;
    std::deque<mpi_transfer> transfers;  // the first `begun` are under way
    std::uint32_t begun = 0;
    bool done = false;
    [[nodiscard]] std::uint32_t waits_for() const noexcept {
        return transfers.empty() ? 0 : transfers.front().waits_for();
    }

    /// Continues the transfers under way, and begins further transfers as long as fewer than
    /// `depth` are under way. Returns the error and the rank at fault. Adds finished transfers to
    /// `sent` and `pace`.
    [[nodiscard]] mpi_transfer::outcome go_on(MPI_Comm comm, std::uint32_t rank, std::uint32_t size,
                                              std::uint32_t depth, bytes& sent, mpi_pace& pace) {
        for (std::uint32_t i = 0; i < begun;) {
            if (const auto failed = transfers[i].go_on(comm); failed.code != errc::none) return failed;
            if (!transfers[i].done()) {
                ++i;
                continue;
            }
            sent += bytes{transfers[i].sent()};
            pace.progressed(std::chrono::steady_clock::now());
            transfers.erase(transfers.begin() + i);
            --begun;
        }
        while (begun < depth && begun < transfers.size()) {
            // Counted as begun first, because begin() may throw halfway.
            const errc code = transfers[begun++].begin(comm, rank, size);
            if (code != errc::none) return {code, rank};
        }
        done = transfers.empty();
        return {};
    }
};

class mpi_requests {
public:
    /// Tells the transfers which requests are finished. Returns false if the MPI can't say.
    [[nodiscard]] bool look(std::deque<mpi_job>& jobs) {
        requests_.clear();
        whose_.clear();
        for (mpi_job& j : jobs)
            for (std::uint32_t i = 0; i < j.begun; ++i) j.transfers[i].add_requests(requests_, whose_);
        if (requests_.empty()) return true;
        finished_.resize(requests_.size());
        statuses_.resize(requests_.size());
        int n = 0;
        const int code =
            MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &n, finished_.data(), statuses_.data());
        // Done on every path, also after an error, because no call may use a request that the MPI
        // has freed.
        for (std::size_t i = 0; i < requests_.size(); ++i) whose_[i].of->put_back(whose_[i].which, requests_[i]);
        if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return false;
        for (std::size_t i = 0; n != MPI_UNDEFINED && i < static_cast<std::size_t>(n); ++i) {
            const auto& [of, which] = whose_[static_cast<std::size_t>(finished_[i])];
            const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
            if (error != MPI_ERR_PENDING) of->finished(which, statuses_[i], error);
        }
        return true;
    }

private:
    std::vector<MPI_Request> requests_;
    std::vector<mpi_transfer::pending> whose_;
    std::vector<int> finished_;
    std::vector<MPI_Status> statuses_;
};

}  // namespace detail
}  // namespace GPUSHARE_ABI
}  // namespace gpushare

#endif
