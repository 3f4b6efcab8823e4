// SPDX-License-Identifier: Apache-2.0
// Memory for a limited number of blocks, which counts its live blocks.
//
//   support::few_blocks pinned(2);    // the third allocation throws std::bad_alloc
#pragma once

#include <cstddef>
#include <memory_resource>
#include <new>

namespace support {

class few_blocks final : public std::pmr::memory_resource {
public:
    explicit few_blocks(int most) : left_(most) {}
    [[nodiscard]] int out() const { return out_; }

private:
    void* do_allocate(std::size_t n, std::size_t alignment) override {
        if (left_-- == 0) throw std::bad_alloc();
        void* const p = std::pmr::new_delete_resource()->allocate(n, alignment);
        ++out_;
        return p;
    }
    void do_deallocate(void* p, std::size_t n, std::size_t alignment) override {
        --out_;
        std::pmr::new_delete_resource()->deallocate(p, n, alignment);
    }
    [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
        return this == &other;
    }
    int left_, out_ = 0;
};
}  // namespace support
