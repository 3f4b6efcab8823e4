// SPDX-License-Identifier: Apache-2.0
// What we are compared with, each at its best: every MPI that is there with several algorithms and
// bindings, Gloo with its algorithms.
//
//   mpi_peers mpi(2);                 // a look at all of them, once
//   const auto us = mpi.sweep();      // at each size the best of those that are worth it
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace bench {

class mpi_peers {
public:
    /// Tries every setting of every MPI, prints what failed and why, and keeps the fewest settings
    /// that are the best somewhere, within 5 %.
    explicit mpi_peers(unsigned ranks);

    /// Microseconds as of bench::sweep, at each size by the fastest setting; nothing without an
    /// MPI.
    [[nodiscard]] std::vector<double> sweep() const;
    /// "Open MPI v4.1.4: ring, by single copies; MPICH Version 5.0.2: default", of those that were
    /// kept. By single copies: its ranks read or wrote each other's memory, counted; the others
    /// copy large messages twice.
    [[nodiscard]] std::string kept() const;

private:
    struct setting {
        std::string name;     // "ring"
        std::string command;  // without the peer's arguments
        std::string version;  // told by the library
        bool single_copies = false;
    };
    struct outcome {
        std::vector<double> us;  // empty: it failed
        std::string version, trouble;
        std::size_t single_copies = 0;
        std::size_t wrong = 0;  // elements
    };
    static std::vector<setting> all_settings(unsigned ranks);
    static outcome run(const setting& s, unsigned fewer);

    std::vector<setting> kept_;
};

/// The same of Gloo by TCP on the loopback, at each size by the fastest of its algorithms.
std::vector<double> gloo_tcp(unsigned ranks);
/// "0.0~git...: ring, bcube"; empty where it isn't installed.
std::string gloo_settings();

}  // namespace bench
