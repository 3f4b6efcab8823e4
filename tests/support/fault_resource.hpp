// SPDX-License-Identifier: Apache-2.0
// An upstream that counts and fails on demand. It knows every live block and notices wrong frees.
// When the test asks for it, an allocation throws the test's exception.
//
//   support::fault_resource upstream;
//   upstream.fail_next([] { throw std::runtime_error("device lost"); });
//   CHECK_THROWS(upstream.allocate(64, 8));   CHECK(upstream.blocks() == 0);
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include <gpushare/concepts.hpp>

namespace support {

/// Only a memory_resource: without try_allocate, charged or error codes. Thread-safe.
class fault_resource {
public:
    fault_resource() = default;
    fault_resource(const fault_resource&) = delete;
    fault_resource& operator=(const fault_resource&) = delete;
    ~fault_resource() {
        for (const auto& [p, b] : out_) ::operator delete (p, std::align_val_t{b.alignment});
    }

    [[nodiscard]] void* allocate(std::size_t size, std::size_t alignment) {
        std::function<void()> fault;
        {
            const std::lock_guard lock(mutex_);
            ++calls_;
            fault = std::exchange(fault_, nullptr);
            if (std::exchange(null_, false)) return nullptr;
        }
        if (fault) fault();
        void* p = ::operator new (size, std::align_val_t{alignment});
        const std::lock_guard lock(mutex_);
        out_.emplace(p, block{size, alignment});
        bytes_ += size;
        return p;
    }

    void deallocate(void* p, std::size_t size, std::size_t alignment) noexcept {
        if (on_deallocate) on_deallocate();
        const std::lock_guard lock(mutex_);
        const auto found = out_.find(p);
        if (found == out_.end() || found->second.size != size || found->second.alignment != alignment) {
            ++wrong_frees_;
            return;
        }
        bytes_ -= size;
        out_.erase(found);
        ::operator delete (p, std::align_val_t{alignment});
    }

    /// The next allocation calls this, which throws.
    void fail_next(std::function<void()> fault = [] { throw std::bad_alloc(); }) {
        const std::lock_guard lock(mutex_);
        fault_ = std::move(fault);
    }
    /// The next allocation returns null, as C interfaces do.
    void null_next() {
        const std::lock_guard lock(mutex_);
        null_ = true;
    }

    /// Called by every deallocation, under no lock. Set it while no other thread uses the resource.
    std::function<void()> on_deallocate;

    /// The number of live blocks.
    [[nodiscard]] std::size_t blocks() const {
        return locked([&] { return out_.size(); });
    }
    [[nodiscard]] std::size_t bytes() const {
        return locked([&] { return bytes_; });
    }
    /// The number of calls of allocate, including failed ones.
    [[nodiscard]] std::size_t calls() const {
        return locked([&] { return calls_; });
    }
    /// The number of frees of blocks that aren't live, or that have another size or alignment. Such
    /// frees change nothing.
    [[nodiscard]] std::size_t wrong_frees() const {
        return locked([&] { return wrong_frees_; });
    }

private:
    struct block {
        std::size_t size, alignment;
    };

    template <std::invocable F>
    std::size_t locked(F f) const {
        const std::lock_guard lock(mutex_);
        return f();
    }

    mutable std::mutex mutex_;
    std::map<void*, block> out_;
    std::function<void()> fault_;
    bool null_ = false;
    std::size_t bytes_ = 0, calls_ = 0, wrong_frees_ = 0;
};
static_assert(gpushare::memory_resource<fault_resource>);

}  // namespace support
