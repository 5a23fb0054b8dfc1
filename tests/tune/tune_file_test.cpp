// The file of a tuned recipe: what is written comes back, byte for byte; anything else is one error
// that names what is wrong.
#include "tune/tune_file.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/tune/a_tune_file.hpp"

namespace kvx::tune {
namespace {

using nlohmann::json;
using testing::HasSubstr;
namespace fs = std::filesystem;
using Bytes = std::vector<uint8_t>;

Bytes encoded(const TuneFile& file) {
  const auto bytes = encode_tune_file(file);
  if (bytes.ok()) return bytes.value();
  ADD_FAILURE() << bytes.error().message;
  return {};
}

std::string encode_error(const std::function<void(TuneFile&)>& change) {
  TuneFile file = a_tune_file();
  change(file);
  const auto bytes = encode_tune_file(file);
  return bytes.ok() ? "accepted" : bytes.error().message;
}

std::string parse_error(const Bytes& bytes) {
  const auto file = parse_tune_file(bytes);
  return file.ok() ? "accepted" : file.error().message;
}

// The JSON header's text.
std::string header_of(const Bytes& bytes) {
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  const auto begin = bytes.begin() + 8;
  return {begin, begin + static_cast<std::ptrdiff_t>(header_bytes)};
}

// A file whose JSON header was changed, its data unchanged.
Bytes with_header(const Bytes& bytes, const std::function<void(json&)>& change) {
  const std::string old = header_of(bytes);
  json header = json::parse(old);
  change(header);
  const std::string text = header.dump();
  const uint64_t header_bytes = text.size();
  Bytes result(8);
  std::memcpy(result.data(), &header_bytes, 8);
  result.insert(result.end(), text.begin(), text.end());
  result.insert(result.end(), bytes.begin() + 8 + std::ssize(old), bytes.end());
  return result;
}

// The same with kvx's own fields.
Bytes with_fields(const std::function<void(json&)>& change) {
  return with_header(encoded(a_tune_file()), [&](json& header) {
    json fields = json::parse(header["__metadata__"]["kvx"].get<std::string>());
    change(fields);
    header["__metadata__"]["kvx"] = fields.dump();
  });
}
Bytes with_tensors(const std::function<void(json&)>& change) {
  return with_header(encoded(a_tune_file()), change);
}

void expect_equal(const TuneFile& found, const TuneFile& expected) {
  EXPECT_EQ(found.recipe, expected.recipe);
  EXPECT_EQ(found.layer_overrides, expected.layer_overrides);
  EXPECT_EQ(found.head_overrides, expected.head_overrides);
  EXPECT_EQ(found.block_size, expected.block_size);
  EXPECT_EQ(found.model.name, expected.model.name);
  EXPECT_EQ(found.model.architecture, expected.model.architecture);
  EXPECT_EQ(found.model.hash, expected.model.hash);
  EXPECT_EQ(found.text_hash, expected.text_hash);
  EXPECT_EQ(found.date, expected.date);
  EXPECT_EQ(json::parse(found.measured), json::parse(expected.measured));
  EXPECT_EQ(found.geometry.num_layers, expected.geometry.num_layers);
  EXPECT_EQ(found.geometry.num_kv_heads, expected.geometry.num_kv_heads);
  EXPECT_EQ(found.geometry.k_head_dim, expected.geometry.k_head_dim);
  EXPECT_EQ(found.geometry.v_head_dim, expected.geometry.v_head_dim);
  ASSERT_EQ(found.layers.size(), expected.layers.size());
  for (size_t i = 0; i < found.layers.size(); ++i) {
    const kv::LayerCalibration& a = found.layers[i];
    const kv::LayerCalibration& b = expected.layers[i];
    EXPECT_EQ(a.k.tensor_scales, b.k.tensor_scales);
    EXPECT_EQ(a.k.group_scales, b.k.group_scales);
    EXPECT_EQ(a.v.tensor_scales, b.v.tensor_scales);
    EXPECT_EQ(a.v.group_scales, b.v.group_scales);
    EXPECT_EQ(a.k_mean, b.k_mean);
    EXPECT_EQ(a.v_mean, b.v_mean);
    EXPECT_EQ(a.k_factor, b.k_factor);
    EXPECT_EQ(a.v_factor, b.v_factor);
    EXPECT_EQ(a.k_feedback, b.k_feedback);
    EXPECT_EQ(a.k_block_offset, b.k_block_offset);
    EXPECT_EQ(a.k_feedback, b.k_feedback);
    EXPECT_EQ(a.k_rope_mean, b.k_rope_mean);
    EXPECT_EQ(a.k_rope, b.k_rope);
  }
}

TEST(TuneFile, ComesBackAsItWasWritten) {
  const TuneFile file = a_tune_file();
  const Bytes bytes = encoded(file);
  const auto found = parse_tune_file(bytes);
  ASSERT_TRUE(found.ok()) << found.error().message;
  expect_equal(found.value(), file);
  EXPECT_EQ(encoded(found.value()), bytes);
}

TEST(TuneFile, HoldsBlockOffsetsWithTheirBlockSize) {
  TuneFile file = a_tune_file();
  for (kv::LayerCalibration& layer : file.layers) {
    layer.k_block_offset = random_table(5 * 128, 9, -1, 1);
    layer.k_rope_mean.clear();
    layer.k_rope = {};
  }
  file.block_size = 32;
  const auto found = parse_tune_file(encoded(file));
  ASSERT_TRUE(found.ok()) << found.error().message;
  expect_equal(found.value(), file);
}

TEST(TuneFile, HoldsErrorFeedback) {
  TuneFile file = a_tune_file();
  const int dim = file.geometry.k_head_dim;
  std::vector<float> feedback = random_table(file.geometry.num_kv_heads * dim * dim, 11, -1, 1);
  for (int i = 0; i < static_cast<int>(feedback.size()); ++i) {
    if (i % dim <= i / dim % dim) feedback[i] = 0;  // weights lie above the diagonal
  }
  file.layers[0].k_feedback = feedback;
  const auto found = parse_tune_file(encoded(file));
  ASSERT_TRUE(found.ok()) << found.error().message;
  EXPECT_EQ(found.value().layers[0].k_feedback, feedback);
  expect_equal(found.value(), file);
}

TEST(TuneFile, IsASafetensorsFile) {
  const Bytes bytes = encoded(a_tune_file());
  const std::string text = header_of(bytes);
  EXPECT_EQ(text.size() % 8, 0u);
  const json header = json::parse(text);
  EXPECT_EQ(header["layers.0.k.factor"]["dtype"], "F32");
  EXPECT_EQ(header["layers.0.k.factor"]["shape"], json({2, 64}));
  EXPECT_EQ(header["ropes.0.inv_freq"]["dtype"], "F64");
  uint64_t end = 0;
  for (const auto& [name, tensor] : header.items()) {
    if (name == "__metadata__") continue;
    end = std::max(end, tensor["data_offsets"][1].get<uint64_t>());
  }
  EXPECT_EQ(8 + text.size() + end, bytes.size());
}

TEST(TuneFile, WhatNoCacheCanBeMadeOfIsNotWritten) {
  EXPECT_THAT(encode_error([](auto& f) { f.recipe = "int5"; }), HasSubstr("format is 'int5'"));
  EXPECT_THAT(encode_error([](auto& f) { f.layer_overrides = {"2=int8"}; }),
              HasSubstr("layer is 2; the cache has layers 0 to 1"));
  EXPECT_THAT(encode_error([](auto& f) { f.head_overrides = {"0:2=int8"}; }),
              HasSubstr("head is 2"));
  EXPECT_THAT(encode_error([](auto& f) { f.layer_overrides = {std::string(3000, ' ')}; }),
              HasSubstr("override has 3000 characters"));
  EXPECT_THAT(encode_error([](auto& f) { f.layers.pop_back(); }),
              HasSubstr("layers has 1 entries; expected num_layers, 2"));
  EXPECT_THAT(encode_error([](auto& f) { f.layers[1].k_factor[3] = 0; }),
              HasSubstr("layer 1 k_factor[3] is 0; expected a positive finite number"));
  EXPECT_THAT(encode_error([](auto& f) { f.layers[0].k_rope_mean.pop_back(); }),
              HasSubstr("layer 0 k_rope_mean has 127 numbers; expected 128"));
  EXPECT_THAT(encode_error([](auto& f) { f.layers[0].v.group_scales.pop_back(); }),
              HasSubstr("layer 0 v_group_scales has 1 numbers; expected 2"));
  EXPECT_THAT(encode_error([](auto& f) { f.layers[1].k_rope = {}; }),
              HasSubstr("layer 1 k_rope inv_freq has 0 numbers"));
  EXPECT_THAT(encode_error([](auto& f) { f.block_size = 64; }), HasSubstr("k_block_size is 64"));
  EXPECT_THAT(encode_error([](auto& f) { f.layers[0].k_block_offset.resize(128); }),
              HasSubstr("k_block_size is 0; expected 1 to"));
  EXPECT_THAT(encode_error([](auto& f) { f.measured = "[]"; }),
              HasSubstr("measured is no JSON object"));
  EXPECT_THAT(encode_error([](auto& f) {
                f.measured = "{\"a\":" + std::string(31, '[') + std::string(31, ']') + "}";
              }),
              HasSubstr("measured is nested deeper than 31"));
}

TEST(TuneFile, CutShortAnywhereIsAnError) {
  const Bytes bytes = encoded(a_tune_file());
  for (size_t size = 0; size < bytes.size(); size += size < 64 ? 1 : 97) {
    const std::string message = parse_error(Bytes(bytes.begin(), bytes.begin() + size));
    EXPECT_NE(message, "accepted") << size;
    EXPECT_FALSE(message.empty()) << size;
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_THAT(parse_error(longer), HasSubstr("1 bytes follow the last tensor"));
}

TEST(TuneFile, AForeignFileIsRefusedByWhatItLacks) {
  EXPECT_THAT(parse_error(Bytes(100, 'x')), HasSubstr("no safetensors file"));
  Bytes empty = {2, 0, 0, 0, 0, 0, 0, 0, '{', '}'};
  EXPECT_THAT(parse_error(empty), HasSubstr("the file is no tuned recipe"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f.erase("recipe"); })),
              HasSubstr("recipe is missing"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["recipe"] = 3; })),
              HasSubstr("recipe is 3; expected text"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["num_layers"] = -1; })),
              HasSubstr("num_layers is -1; expected a whole number"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["num_layers"] = 1 << 30; })),
              HasSubstr("num_layers is 1073741824"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["colour"] = 1; })),
              HasSubstr("'colour' is no field of version 1"));
}

TEST(TuneFile, ANewerVersionIsIncompatible) {
  const auto file = parse_tune_file(with_fields([](json& f) { f["version"] = 2; }));
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.error().code, ErrorCode::kIncompatible);
  EXPECT_THAT(file.error().message, HasSubstr("version is 2; this library reads version 1"));
}

TEST(TuneFile, ATensorThatLiesIsNamed) {
  const char* name = "layers.0.k.factor";
  const auto error_of = [&](const std::function<void(json&)>& change) {
    return parse_error(with_tensors([&](json& header) { change(header[name]); }));
  };
  EXPECT_THAT(error_of([](json& t) { t["dtype"] = "BF16"; }),
              HasSubstr("'layers.0.k.factor' dtype is \"BF16\"; expected F32 or F64"));
  EXPECT_THAT(error_of([](json& t) {
                t["shape"] = {64, 2};
              }),
              HasSubstr("'layers.0.k.factor' has the shape [64, 2]; expected F32 [2, 64]"));
  EXPECT_THAT(error_of([](json& t) {
                t["shape"] = {2, 65};
              }),
              HasSubstr("has 512 bytes; its shape and dtype need others"));
  EXPECT_THAT(error_of([](json& t) {
                t["shape"] = {1ull << 62, 1ull << 62};
              }),
              HasSubstr("has 512 bytes"));
  EXPECT_THAT(error_of([](json& t) {
                t["data_offsets"] = {8, 4};
              }),
              HasSubstr("data_offsets are no [begin, end]"));
  EXPECT_THAT(error_of([](json& t) {
                t["data_offsets"][0] = t["data_offsets"][0].get<int>() + 4;
                t["data_offsets"][1] = t["data_offsets"][1].get<int>() + 4;
              }),
              HasSubstr("of the data; expected"));
  EXPECT_THAT(error_of([](json& t) { t["more"] = 1; }),
              HasSubstr("expected dtype, shape and data_offsets"));
}

TEST(TuneFile, ATensorThatIsUnknownIsRefused) {
  for (const char* unknown : {"layers.2.k.factor", "layers.00.k.factor", "layers.-1.k.factor",
                              "layers.0.k.colour", "factor"}) {
    EXPECT_THAT(parse_error(with_tensors([&](json& header) {
                  header[unknown] = header["layers.0.k.factor"];
                  header.erase("layers.0.k.factor");
                })),
                HasSubstr("is none of version 1"))
        << unknown;
  }
}

TEST(TuneFile, RopesAndMeansGoTogether) {
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["ropes"][0]["pairs"] = "thirds"; })),
              HasSubstr("ropes pairs is 'thirds'; expected halves or interleaved"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["ropes"][0]["layers"] = {7}; })),
              HasSubstr("ropes layers holds 7; expected 0 to 1"));
  EXPECT_THAT(parse_error(with_fields([](json& f) {
                f["ropes"][0]["layers"] = {0, 1};
              })),
              HasSubstr("ropes name layer 1 twice"));
  EXPECT_THAT(parse_error(with_fields([](json& f) { f["ropes"].erase(1); })),
              HasSubstr("'ropes.1.inv_freq' is none of version 1 with 1 ropes"));
}

TEST(TuneFile, ANameTwiceAndADeepNestAreRefused) {
  const auto with_text = [](const std::string& text) {
    Bytes bytes(8);
    const uint64_t size = text.size();
    std::memcpy(bytes.data(), &size, 8);
    bytes.insert(bytes.end(), text.begin(), text.end());
    return bytes;
  };
  EXPECT_THAT(parse_error(with_text(R"({"a":1,"a":2})")), HasSubstr("holds 'a' twice"));
  EXPECT_THAT(parse_error(with_text("{\"a\":" + std::string(100000, '['))),
              HasSubstr("nested deeper than 32"));
  EXPECT_THAT(parse_error(with_text("{\"a\":")), HasSubstr("the header is no JSON"));
  EXPECT_THAT(parse_error(with_text("[1]")), HasSubstr("no JSON object"));
}

class TuneFileOnDisk : public testing::Test {
 protected:
  TuneFileOnDisk() : folder_(fs::temp_directory_path() / ("kvx_tune_" + std::to_string(getpid()))) {
    fs::create_directory(folder_);
  }
  ~TuneFileOnDisk() override { fs::remove_all(folder_); }

  fs::path folder_;
};

TEST_F(TuneFileOnDisk, IsReadAndWrittenWithItsName) {
  const std::string path = (folder_ / "m.kvxtune").string();
  ASSERT_TRUE(write_tune_file(path, a_tune_file()).ok());
  const auto found = read_tune_file(path);
  ASSERT_TRUE(found.ok()) << found.error().message;
  expect_equal(found.value(), a_tune_file());
  EXPECT_THAT(read_tune_file(path + "2").error().message, HasSubstr("m.kvxtune2' cannot be read"));
  EXPECT_THAT(read_tune_file(folder_.string()).error().message, HasSubstr("is no regular file"));
}

TEST_F(TuneFileOnDisk, AFailedWriteLeavesTheOldFileAndNothingElse) {
  const std::string path = (folder_ / "m.kvxtune").string();
  ASSERT_TRUE(write_tune_file(path, a_tune_file()).ok());
  TuneFile wrong = a_tune_file();
  wrong.layers[0].v_mean[5] = std::nanf("");
  const Status written = write_tune_file(path, wrong);
  ASSERT_FALSE(written.ok());
  EXPECT_THAT(written.error().message, HasSubstr("m.kvxtune': layer 0 v_mean[5] is nan"));
  EXPECT_TRUE(read_tune_file(path).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

}  // namespace
}  // namespace kvx::tune
