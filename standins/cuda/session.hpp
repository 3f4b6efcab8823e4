// SPDX-License-Identifier: Apache-2.0
// One test on the stand-in. A session starts with an empty machine, and checks at its end that no
// object was leaked and no forbidden call was made.
//
//   TEST_CASE("...", "[cuda]") {
//       const standin::session gpu{{.devices = 1}};  // first: it must outlive what the test makes
//       ...
//   }
#pragma once

#include <exception>
#include <string>

#include <catch2/catch.hpp>
#include "standin.hpp"

namespace standin {

class session {
public:
    explicit session(const options& o = {}) { reset(o); }
    session(const session&) = delete;
    session& operator=(const session&) = delete;
    ~session() {
        const std::string found = take_findings();
        if (std::uncaught_exceptions() == unwinding_) CHECK(found == "");  // otherwise the test has failed already
    }

private:
    const int unwinding_ = std::uncaught_exceptions();
};

}  // namespace standin
