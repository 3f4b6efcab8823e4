// SPDX-License-Identifier: Apache-2.0
// OpenVINO's wheel brings a front end for GGUF files, but doesn't list it, so this file creates the
// front end itself.
#include "inference_server/openvino/language_model.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include <openvino/frontend/gguf/frontend.hpp>
#include <openvino/frontend/gguf/tokenizer_metadata.hpp>
#include <openvino/op/constant.hpp>
#include <openvino/op/parameter.hpp>
#include <openvino/op/scatter_update.hpp>

#include "inference_server/openvino/runtime.hpp"

namespace inference_server::openvino {

namespace {

constexpr std::string_view blank = "\u2581";  // a space, in tokens

/// The input and the output of one cache.
struct cache {
    std::string in;
    std::size_t out = 0;
};

/// The front end writes new rows of the caches along their heads instead of along their tokens.
/// This corrects it, and finds the caches.
std::vector<cache> mend(const ov::Model& model) {
    std::vector<cache> caches;
    for (std::size_t i = 0; i < model.outputs().size(); ++i) {
        const auto update = std::dynamic_pointer_cast<ov::op::v3::ScatterUpdate>(
            model.output(i).get_node()->get_input_node_shared_ptr(0));
        if (update == nullptr) continue;
        update->input(3).replace_source_output(ov::op::v0::Constant::create(ov::element::i64, ov::Shape{}, {1}));
        caches.push_back({update->input_value(0).get_any_name(), i});
    }
    if (caches.empty()) throw std::runtime_error("no caches among the outputs of the language model");
    return caches;
}

std::size_t size_of(const ov::Output<const ov::Node>& port) {
    return ov::shape_size(port.get_shape()) * port.get_element_type().size();
}

/// The bytes of the character that begins with this byte.
std::size_t character(char first) noexcept {
    const auto c = static_cast<unsigned char>(first);
    return c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

}  // namespace

struct language_model::model {
    explicit model(std::size_t room) {
        ov::frontend::gguf::FrontEnd front_end;
        const auto m = front_end.convert(front_end.load(file("gemma/gemma-3-270m-q4_k_m.gguf")));
        read_vocabulary(*m);
        const auto found = mend(*m);
        std::map<std::string, ov::PartialShape> shapes;
        for (const auto& input : m->inputs()) {
            const auto& name = input.get_any_name();
            const auto r = static_cast<std::int64_t>(room);
            shapes[name] = name.starts_with("cache")   ? ov::PartialShape{1, r, 1, input.get_partial_shape()[3]}
                           : name.starts_with("self")  ? ov::PartialShape{1, 1, 1, r}
                           : name.starts_with("token") ? ov::PartialShape{1}
                                                       : ov::PartialShape{1, 1, 1, 1};
        }
        m->reshape(shapes);
        auto compiled = compile(m);
        // Two requests read each other's outputs, so the caches aren't copied from token to token.
        for (auto& r : requests) {
            r = compiled.create_infer_request();
            r.get_tensor("inp_out_ids").data<std::int32_t>()[0] = 0;
            r.get_tensor("token_len_per_seq").data<std::int64_t>()[0] = 1;
        }
        for (const auto& c : found) {
            caches.emplace_back(compiled.input(c.in), compiled.output(c.out));
            cache_bytes += size_of(caches.back().first);
        }
    }
    void read_vocabulary(const ov::Model& m) {
        using metadata = ov::frontend::gguf::GGUFTokenizerMetadata;
        const auto& any = m.get_rt_info().at(ov::frontend::gguf::gguf_tokenizer_metadata_key());
        const auto& config = any.as<std::shared_ptr<metadata>>()->config;
        pieces = config.at("tokens").as<std::vector<std::string>>();
        const auto& all = config.at("scores").as<ov::Tensor>();
        scores.assign(all.data<float>(), all.data<float>() + all.get_size());
        if (scores.size() != pieces.size()) throw std::runtime_error("the language model's vocabulary is broken");
        for (std::size_t i = 0; i < pieces.size(); ++i) ids.emplace(pieces[i], static_cast<std::int32_t>(i));
    }
    void bind(std::byte* memory) {
        for (const auto& [in, out] : caches) {
            std::array<ov::Tensor, 2> both;
            for (auto& t : both) {
                t = ov::Tensor(in.get_element_type(), in.get_shape(), memory);
                memory += size_of(in);
            }
            for (std::size_t i = 0; i < 2; ++i) {
                requests[i].set_tensor(in, both[i]);
                requests[i].set_tensor(out, both[1 - i]);
            }
        }
    }

    std::vector<std::string> pieces;
    std::vector<float> scores;
    std::unordered_map<std::string_view, std::int32_t> ids;  // ids of pieces
    std::array<ov::InferRequest, 2> requests;
    std::vector<std::pair<ov::Output<const ov::Node>, ov::Output<const ov::Node>>> caches;
    std::size_t cache_bytes = 0;
};

language_model::language_model(std::size_t room) : room_(room), model_(std::make_unique<model>(room)) {}
language_model::~language_model() = default;

std::int32_t language_model::token(std::string_view piece) const {
    const auto found = model_->ids.find(piece);
    if (found == model_->ids.end()) throw std::runtime_error("the language model has no such token");
    return found->second;
}

std::vector<std::int32_t> language_model::tokens_of(std::string_view utf8) const {
    std::string all;
    for (const char c : utf8) c == ' ' ? (all += blank) : (all += c);
    std::vector<std::string_view> parts;
    for (std::size_t at = 0; at < all.size(); at += parts.back().size())
        parts.push_back(std::string_view(all).substr(at, character(all[at])));
    for (;;) {
        std::size_t best = parts.size();
        float score = -std::numeric_limits<float>::infinity();
        for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
            const auto found = model_->ids.find({parts[i].data(), parts[i].size() + parts[i + 1].size()});
            if (found == model_->ids.end() || model_->scores[static_cast<std::size_t>(found->second)] <= score)
                continue;
            score = model_->scores[static_cast<std::size_t>(found->second)];
            best = i;
        }
        if (best == parts.size()) break;
        parts[best] = {parts[best].data(), parts[best].size() + parts[best + 1].size()};
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    std::vector<std::int32_t> tokens{token("<bos>")};
    for (const auto& p : parts) {
        if (const auto found = model_->ids.find(p); found != model_->ids.end()) {
            tokens.push_back(found->second);
            continue;
        }
        for (const char c : p) {  // one token for each byte
            constexpr std::string_view digits = "0123456789ABCDEF";
            const auto b = static_cast<unsigned char>(c);
            tokens.push_back(token(std::string("<0x") + digits[b / 16U] + digits[b % 16U] + ">"));
        }
    }
    return tokens;
}

std::string language_model::text_of(std::int32_t token) const {
    auto piece = model_->pieces.at(static_cast<std::size_t>(token));
    if (piece.size() == 6 && piece.starts_with("<0x")) {
        unsigned byte = 0;
        if (std::from_chars(piece.data() + 3, piece.data() + 5, byte, 16).ec == std::errc{})
            return std::string(1, static_cast<char>(byte));
    }
    for (auto at = piece.find(blank); at != std::string::npos; at = piece.find(blank))
        piece.replace(at, blank.size(), " ");
    return piece;
}

bool language_model::ends(std::int32_t token) const noexcept {
    const std::string_view piece = model_->pieces[static_cast<std::size_t>(token)];
    return piece == "<eos>" || piece == "<end_of_turn>";
}

language_model::text::text(language_model& of, std::pmr::memory_resource& memory)
    : of_(of), caches_(2 * of.model_->cache_bytes / sizeof(line), &memory) {}

language_model::text::~text() {
    const text* me = this;
    of_.bound_.compare_exchange_strong(me, nullptr);
}

void language_model::text::begin() noexcept {
    heard_ = 0;
    std::ranges::fill(caches_, line{});
}

std::int32_t language_model::text::hear(std::int32_t token) {
    auto& m = *of_.model_;
    if (heard_ == of_.room_) throw std::length_error("the text is longer than the language model's caches");
    if (of_.bound_.load() != this) {
        m.bind(caches_.data()->bytes);
        of_.bound_.store(this);
    }
    auto& r = m.requests[heard_ % 2];
    r.get_tensor("inp_tokens").data<std::int32_t>()[0] = token;
    r.get_tensor("inp_pos").data<std::int32_t>()[0] = static_cast<std::int32_t>(heard_);
    r.get_tensor("inp_kv_idx").data<std::int32_t>()[0] = static_cast<std::int32_t>(heard_);
    ++heard_;
    for (const auto* name : {"self_kq_mask", "self_kq_mask_swa"}) {
        const std::span mask(r.get_tensor(name).data<float>(), of_.room_);
        std::ranges::fill(mask, -std::numeric_limits<float>::infinity());
        std::ranges::fill(mask.first(heard_), 0.0F);
    }
    r.infer();
    const auto scores = r.get_output_tensor(0);
    const auto* first = scores.data<float>();
    return static_cast<std::int32_t>(std::max_element(first, first + scores.get_size()) - first);
}

}  // namespace inference_server::openvino
