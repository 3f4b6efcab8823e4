// SPDX-License-Identifier: Apache-2.0
// Small kernels for tests of the executor, written in PTX.
//
//   // %rd1: the first of `words`
//   small_kernel k(".reg .b32 %r<4>; ... st.global.u32 [%rd1], %r1;");
//   k.run({.blocks = {2, 1, 1}});
//   k.words[0];  k.machine().findings();
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "standins/ptx/machine.hpp"

namespace ptx_test {

/// One kernel with one argument, the address of 64 words. The words count as never written, unless
/// `written` is passed.
class small_kernel {
public:
    explicit small_kernel(const std::string& body, ptx::machine_options o = {},
                          ptx::contents c = ptx::contents::written)
        : text_(
              ".version 9.0\n.target sm_90\n.address_size 64\n.visible .entry test(.param .u64 words)\n{\n"
              ".reg .pred %p<8>;\n.reg .b16 %rs<8>;\n.reg .b32 %r<16>;\n.reg .f32 %f<8>;\n.reg .b64 %rd<8>;\n"
              ".shared .align 4 .b8 shared_words[256];\n"
              "ld.param.u64 %rd1, [words];\nmov.u32 %r1, %tid.x;\nmov.u32 %r2, %ctaid.x;\n" +
              body + "\nret;\n}\n"),
          program_(ptx::decode(ptx::text::parse(text_))),
          machine_(std::make_unique<ptx::machine>(o)) {
        machine_->memory().add(address(), sizeof words, c);
    }

    /// Runs until all grids have ended.
    void run(ptx::launch l = {}) {
        start(std::move(l));
        while (machine_->busy()) machine_->run(10'000);
    }
    std::shared_ptr<ptx::grid> start(ptx::launch l = {}) {
        l.of = &program_;
        l.kernel = program_.find("test");
        const std::uintptr_t where = address();
        l.arguments.resize(sizeof where);
        std::memcpy(l.arguments.data(), &where, sizeof where);
        grids_.push_back(machine_->start(std::move(l)));
        return grids_.back();
    }
    [[nodiscard]] ptx::machine& machine() { return *machine_; }
    [[nodiscard]] ptx::function& kernel() { return *program_.functions[0]; }
    /// All findings, one per line.
    [[nodiscard]] std::string found() const {
        std::string all;
        for (const auto& f : machine_->findings()) all += f + "\n";
        return all;
    }

    alignas(64) std::array<std::uint32_t, 64> words{};

private:
    [[nodiscard]] std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(words.data()); }

    std::string text_;
    ptx::program program_;
    std::unique_ptr<ptx::machine> machine_;
    std::vector<std::shared_ptr<ptx::grid>> grids_;
};

}  // namespace ptx_test
