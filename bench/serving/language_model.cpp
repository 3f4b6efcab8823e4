// SPDX-License-Identifier: Apache-2.0
// Gemma 3 270M from its GGUF file. OpenVINO's wheel brings a front end for such files that it doesn't list, so it is made by hand.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <openvino/frontend/gguf/frontend.hpp>
#include <openvino/frontend/gguf/tokenizer_metadata.hpp>
#include <openvino/op/constant.hpp>
#include <openvino/op/parameter.hpp>
#include <openvino/op/scatter_update.hpp>

#include "serving/engines.hpp"
#include "serving/openvino.hpp"

namespace bench::serving {

namespace {

constexpr std::array<std::string_view, 6> prompt{"<bos>",    "The",          "\u2581capital",
                                                 "\u2581of", "\u2581France", "\u2581is"};
constexpr std::size_t tokens = 64, room = 128;  // of the caches, in tokens

/// The input and the output of one cache.
struct cache {
    std::string in;
    std::size_t out = 0;
};

class language_model final : public engine {
public:
    explicit language_model(const cache_memory& memory) : engine(tokens) {
        ov::frontend::gguf::FrontEnd front_end;
        const auto model = front_end.convert(front_end.load(file("gemma/gemma-3-270m-q4_k_m.gguf")));
        read_vocabulary(*model);
        const auto caches = mend(*model);
        std::map<std::string, ov::PartialShape> shapes;
        for (const auto& input : model->inputs()) {
            const auto& name = input.get_any_name();
            shapes[name] = name.starts_with("cache")   ? ov::PartialShape{1, room, 1, input.get_partial_shape()[3]}
                           : name.starts_with("self")  ? ov::PartialShape{1, 1, 1, room}
                           : name.starts_with("token") ? ov::PartialShape{1}
                                                       : ov::PartialShape{1, 1, 1, 1};
        }
        model->reshape(shapes);
        auto compiled = compile(model);
        // Two requests read each other's outputs: nothing is copied from token to token.
        for (auto& r : requests_) r = compiled.create_infer_request();
        for (const auto& c : caches) {
            const auto& port = compiled.input(c.in);
            std::array<ov::Tensor, 2> both;
            for (auto& t : both) {
                const auto size = ov::shape_size(port.get_shape()) * port.get_element_type().size();
                t = ov::Tensor(port.get_element_type(), port.get_shape(), memory(size));
                std::memset(t.data(), 0, size);
                all_.push_back(t);
            }
            for (std::size_t i = 0; i < 2; ++i) {
                requests_[i].set_tensor(port, both[i]);
                requests_[i].set_tensor(compiled.output(c.out), both[1 - i]);
            }
        }
        for (auto& r : requests_) {
            r.get_tensor("inp_out_ids").data<std::int32_t>()[0] = 0;
            r.get_tensor("token_len_per_seq").data<std::int64_t>()[0] = 1;
        }
    }

    [[nodiscard]] std::string said() const override {
        std::string text;
        for (std::size_t i = 0; i < prompt.size(); ++i) text += prompt[i];
        for (std::size_t i = prompt.size() - 1; i < tokens; ++i) text += vocabulary_[spoken_[i]];
        constexpr std::string_view space = "\u2581";
        for (auto at = text.find(space); at != std::string::npos; at = text.find(space))
            text.replace(at, space.size(), " ");
        return text;
    }

private:
    void read_vocabulary(const ov::Model& model) {
        using metadata = ov::frontend::gguf::GGUFTokenizerMetadata;
        const auto& any = model.get_rt_info().at(ov::frontend::gguf::gguf_tokenizer_metadata_key());
        vocabulary_ = any.as<std::shared_ptr<metadata>>()->config.at("tokens").as<std::vector<std::string>>();
        for (std::size_t i = 0; i < prompt.size(); ++i) {
            const auto found = std::ranges::find(vocabulary_, prompt[i]);
            if (found == vocabulary_.end()) throw std::runtime_error("the language model doesn't know its prompt");
            prompt_[i] = static_cast<std::int32_t>(found - vocabulary_.begin());
        }
    }

    /// The front end writes new rows of the caches along their heads instead of their tokens. Finds the caches on the way.
    static std::vector<cache> mend(const ov::Model& model) {
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

    std::uint64_t step(std::size_t i) override {
        if (i == 0)
            for (auto& t : all_) std::memset(t.data(), 0, t.get_byte_size());
        auto& r = requests_[i % 2];
        r.get_tensor("inp_tokens").data<std::int32_t>()[0] = i < prompt_.size() ? prompt_[i] : last_;
        r.get_tensor("inp_pos").data<std::int32_t>()[0] = static_cast<std::int32_t>(i);
        r.get_tensor("inp_kv_idx").data<std::int32_t>()[0] = static_cast<std::int32_t>(i);
        for (const auto* name : {"self_kq_mask", "self_kq_mask_swa"}) {
            const std::span mask(r.get_tensor(name).data<float>(), room);
            std::ranges::fill(mask, -std::numeric_limits<float>::infinity());
            std::ranges::fill(mask.first(i + 1), 0.0F);
        }
        r.infer();
        const auto scores = r.get_output_tensor(0);
        const auto* first = scores.data<float>();
        last_ = static_cast<std::int32_t>(std::max_element(first, first + scores.get_size()) - first);
        spoken_[i] = static_cast<std::size_t>(last_);
        return spoken_[i];
    }

    std::vector<std::string> vocabulary_;
    std::array<std::int32_t, prompt.size()> prompt_{};
    std::array<ov::InferRequest, 2> requests_;
    std::vector<ov::Tensor> all_;  // caches
    std::int32_t last_ = 0;
    std::array<std::size_t, tokens> spoken_{};
};

}  // namespace

std::unique_ptr<engine> make_language_model(const cache_memory& memory) {
    return std::make_unique<language_model>(memory);
}

}  // namespace bench::serving
