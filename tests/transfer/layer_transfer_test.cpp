// Layer files of a folder leave one process and enter another, layer by layer while they are
// written: whole and in order, or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "tier/file_summary.hpp"
#include "tier/layers/layer_file.hpp"
#include "tier/whole_file.hpp"
#include "transfer/folder_server.hpp"
#include "transfer/layer_fetch.hpp"
#include "transfer/open_component.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer::layer_transfer_test {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int kNumTokens = 4;

tier::LayerHead head_of(const std::string& name, const std::vector<int64_t>& page_bytes,
                        const std::string& fingerprint) {
  tier::FileIndex index;
  index.fingerprint = fingerprint;
  index.block_size = kNumTokens;
  index.scopes = {{"", name, ""}};
  index.blocks = {{-1, {1, 2, 3, 4}, {}}};
  for (const int64_t bytes : page_bytes) {
    const auto layer = static_cast<int32_t>(index.kinds.size());
    index.kinds.push_back({layer, false, bytes});
    index.blocks[0].block_copies.push_back({layer, tier::Codec::kRaw, 0, 0, {}});
  }
  return tier::lay_out_layers(std::move(index));
}

std::vector<uint8_t> page_of(const std::string& name, size_t layer, int64_t bytes) {
  std::vector<uint8_t> page(static_cast<size_t>(bytes));
  for (size_t i = 0; i < page.size(); ++i) {
    page[i] = static_cast<uint8_t>(i * 31 + layer * 7 + name.back());
  }
  return page;
}

// Two folders, one of them served, both gone with the test.
class LayerTransfer : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("kvx-layers-{}", getpid());
    fs::create_directories(root_ / "from");
    fs::create_directories(root_ / "to");
    auto made = FolderServer::create("tcp://127.0.0.1:*", (root_ / "from").string());
    ASSERT_TRUE(made.ok()) << made.error().message;
    server_ = std::move(made).value();
  }
  void TearDown() override { fs::remove_all(root_); }

  std::string path(const std::string& side, const std::string& name) const {
    return (root_ / side / (name + ".kvx")).string();
  }
  void begin(const std::string& name, const std::vector<int64_t>& page_bytes = {96, 32}) {
    const tier::LayerHead head = head_of(name, page_bytes, "order x\nrecipe int8\n");
    ASSERT_TRUE(tier::create_layer_file(path("from", name), head).ok());
  }
  void put_layer(const std::string& name, size_t layer,
                 const std::vector<int64_t>& page_bytes = {96, 32}) {
    const tier::LayerHead head = head_of(name, page_bytes, "order x\nrecipe int8\n");
    const Status written =
        tier::write_record(path("from", name), head.index.blocks[0].block_copies[layer],
                           page_of(name, layer, page_bytes[layer]));
    ASSERT_TRUE(written.ok()) << written.error().message;
  }
  void put(const std::string& name, const std::vector<int64_t>& page_bytes = {96, 32}) {
    begin(name, page_bytes);
    for (size_t layer = 0; layer < page_bytes.size(); ++layer) put_layer(name, layer, page_bytes);
  }
  std::vector<uint8_t> read(const std::string& side, const std::string& name) const {
    auto found = tier::read_whole_file(path(side, name), kMostFileBytes);
    return found.ok() ? std::move(found).value() : std::vector<uint8_t>();
  }
  FetchOptions options(int64_t wait_ms = 0) const {
    FetchOptions options;
    options.endpoint = server_->endpoint();
    options.folder = (root_ / "to").string();
    options.timeout_ms = 10000;
    options.wait_ms = wait_ms;
    options.fingerprint = "order x\nrecipe int8\n";
    return options;
  }

  fs::path root_;
  std::unique_ptr<FolderServer> server_;
};

TEST_F(LayerTransfer, BringsPagesOfAnySizeAsTheyAre) {
  const std::vector<std::vector<int64_t>> sizes = {
      {1}, {100, 1}, {kPartBytes - 1, 5, 64}, {kPartBytes, 2 * kPartBytes + 1}};
  std::vector<std::string> names;
  for (const std::vector<int64_t>& pages : sizes) {
    names.push_back(fmt::format("file-{}", names.size()));
    put(names.back(), pages);
  }
  const Result<FetchReport> report = fetch_layers(options(), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, std::ssize(names));
  if (report.value().num_asked_again == 0) {  // else some came twice
    EXPECT_EQ(server_->counts().bytes, report.value().bytes);
    EXPECT_EQ(server_->counts().num_files, std::ssize(names));
  }
  for (const std::string& name : names) EXPECT_EQ(read("to", name), read("from", name)) << name;
}

// As pages of a small model: 30 layers of 3 heads of 64 numbers in 4.5 bits, 64 tokens a block.
TEST_F(LayerTransfer, SendsTwoPercentMoreThanThePagesAtMost) {
  const std::vector<int64_t> pages(30, 2 * 3 * 64 * 36);
  std::vector<std::string> names;
  for (int i = 0; i < 70; ++i) put(names.emplace_back(fmt::format("{:064}", i)), pages);
  const Result<FetchReport> report = fetch_layers(options(), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  const double packed = 70.0 * 30 * 2 * 3 * 64 * 36;
  EXPECT_LE(static_cast<double>(report.value().bytes), 1.02 * packed);
}

TEST_F(LayerTransfer, EndsAtTheFirstThatIsNotThere) {
  std::vector<std::string> names;
  for (int i = 0; i < 60; ++i) {
    names.push_back(fmt::format("{:02}", i));
    if (i != 23) put(names.back());
  }
  const Result<FetchReport> report = fetch_layers(options(), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, 23);
  EXPECT_EQ(report.value().problem, "");
  EXPECT_EQ(read("to", "22"), read("from", "22"));
  EXPECT_TRUE(read("to", "23").empty());
  EXPECT_EQ(fetch_layers(options(), {}).value().num_files, 0);
}

TEST_F(LayerTransfer, ALayerLeavesWhileTheNextOneIsComputed) {
  const std::vector<std::string> names = {"a", "b", "c"};
  const std::vector<int64_t> pages(5, 4096);
  for (const char* name : {"a", "b"}) begin(name, pages);
  std::atomic<bool> is_over = false;
  std::jthread writer([&] {
    for (size_t layer = 0; layer < pages.size(); ++layer) {
      // Each layer waits until the one before it has left.
      const auto sent_before = static_cast<int64_t>(2 * layer * 4096);
      while (server_->counts().bytes < sent_before && !is_over) std::this_thread::yield();
      for (const char* name : {"a", "b"}) put_layer(name, layer, pages);
    }
    put("c", pages);
  });
  const Result<FetchReport> report = fetch_layers(options(10000), names);
  is_over = true;
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, 3);
  for (const std::string& name : names) EXPECT_EQ(read("to", name), read("from", name));
}

TEST_F(LayerTransfer, AFileThatIsNeverFinishedIsLeftOut) {
  put("a");
  begin("b");
  put_layer("b", 0);
  const std::vector<std::string> names = {"a", "b"};
  const Result<FetchReport> report = fetch_layers(options(30), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, 1);
  for (const auto& entry : fs::directory_iterator(root_ / "to")) {
    EXPECT_EQ(entry.path().filename(), "a.kvx") << "what came of b is no file";
  }
  const auto open = tier::CacheFileReader::open(path("from", "b"));
  ASSERT_FALSE(open.ok());
  EXPECT_THAT(open.error().message, HasSubstr("layer 1 has not come"));
}

TEST_F(LayerTransfer, BringsSomeHeadsAlone) {
  put("a", {96, 32});
  FetchOptions some = options();
  some.heads = {1, 3, 4};
  some.fingerprint_of_heads = "order x\nrecipe int8\nheads 1 to 3\n";
  const std::vector<std::string> names = {"a"};
  const Result<FetchReport> report = fetch_layers(some, names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  auto file = tier::CacheFileReader::open(path("to", "a"));
  ASSERT_TRUE(file.ok()) << file.error().message;
  const tier::FileIndex& index = file.value().index();
  EXPECT_EQ(index.fingerprint, some.fingerprint_of_heads);
  for (const tier::StoredBlockCopy& copy : index.blocks[0].block_copies) {
    const int64_t whole = copy.kind == 0 ? 96 : 32;
    std::vector<uint8_t> page(static_cast<size_t>(whole / 2));
    ASSERT_TRUE(file.value().read_block_copy(copy, page).ok());
    const std::vector<uint8_t> all = page_of("a", static_cast<size_t>(copy.kind), whole);
    EXPECT_TRUE(std::equal(page.begin(), page.end(), all.begin() + whole / 4));
  }
  some.heads = {0, 1, 5};
  EXPECT_THAT(fetch_layers(some, names).value().problem, HasSubstr("is not one of 5 heads"));
  some.heads = {2, 2, 4};
  EXPECT_THAT(fetch_layers(some, names).error().message, HasSubstr("heads are 2 to 2 of 4"));
}

TEST_F(LayerTransfer, DamagedAndOtherFilesAreNamed) {
  for (const char* name : {"a", "b", "c"}) put(name);
  auto bytes = read("from", "b");
  bytes.back() ^= 4;  // of the last page's padding: nothing
  bytes[bytes.size() - 40] ^= 4;
  ASSERT_TRUE(tier::write_whole_file(path("from", "b"), bytes).ok());
  const std::vector<std::string> names = {"a", "b", "c"};
  const Result<FetchReport> report = fetch_layers(options(), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, 1);
  EXPECT_THAT(report.value().problem, HasSubstr("'b': the page of layer 1 is damaged"));
  FetchOptions other = options();
  other.fingerprint = "order x\nrecipe int4\n";
  const auto refused = fetch_layers(other, names);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().code, ErrorCode::kIncompatible);
  EXPECT_THAT(refused.error().message, HasSubstr("recipe is int8; expected int4"));
}

TEST_F(LayerTransfer, RefusesCallsThatCannotBe) {
  const auto message = [](const FetchOptions& options, std::string name = "a") {
    const std::vector<std::string> names = {std::move(name)};
    const auto report = fetch_layers(options, names);
    return report.ok() ? "" : report.error().message;
  };
  put("a");
  EXPECT_THAT(message(options(), "../a"), HasSubstr("a file's name is '../a'"));
  EXPECT_THAT(message(options(), ""), HasSubstr("a file's name is ''"));
  EXPECT_THAT(message(options(), std::string(129, 'a')), HasSubstr("1 to 128 letters"));
  EXPECT_THAT(message(options(-1)), HasSubstr("wait_ms is -1"));
  FetchOptions other = options();
  other.endpoint = "";
  EXPECT_THAT(message(other), HasSubstr("endpoint is ''"));
  other.endpoint = "tcp://127.0.0.1:1";
  other.timeout_ms = 50;
  EXPECT_THAT(message(other), HasSubstr("nobody at tcp://127.0.0.1:1 has answered"));
  other = options();
  other.folder = (root_ / "nowhere").string();
  EXPECT_THAT(message(other), HasSubstr("nowhere"));
  EXPECT_THAT(FolderServer::create("x", "/tmp").error().message, HasSubstr("'x' cannot be bound"));
  EXPECT_THAT(FolderServer::create("", "/tmp").error().message, HasSubstr("endpoint is ''"));
}

// What a hostile client asks of the server, and its answer.
Answer answer_to(const FolderServer& server, const std::vector<uint8_t>& request,
                 std::vector<uint8_t>& bytes) {
  const kvx_transfer_functions_t* const functions = open_component().value();
  kvx_transfer_error error{};
  kvx_transfer_client* const client = functions->client_create(server.endpoint(), &error);
  EXPECT_EQ(functions->client_send(client, request.data(), request.size(), &error), 0);
  const auto take = [](void* to, const void* from, uint64_t count) {
    const auto* const first = static_cast<const uint8_t*>(from);
    static_cast<std::vector<uint8_t>*>(to)->assign(first, first + count);
  };
  EXPECT_EQ(functions->client_receive(client, 60'000, take, &bytes, &error), 1);
  functions->client_free(client);
  return parse_answer(bytes).value();
}

TEST_F(LayerTransfer, TheServerGivesNothingButFilesOfItsFolder) {
  ASSERT_TRUE(tier::write_whole_file((root_ / "secret.kvx").string(), {}).ok());
  put("a");
  ASSERT_TRUE(tier::write_whole_file(path("from", "b"), read("from", "a")).ok());
  fs::resize_file(path("from", "b"), 70);
  Request request;
  request.kind = Kind::kLayers;
  std::vector<uint8_t> bytes;
  for (const char* name : {"../secret", "/etc/passwd", "", "a.kvx", "a/../a", "a  a"}) {
    request.text = name;
    EXPECT_EQ(answer_to(*server_, encode(request), bytes).kind, Kind::kRefused) << name;
  }
  request.text = "b";
  EXPECT_EQ(answer_to(*server_, encode(request), bytes).num_parts, 0u) << "it is cut short";
  request.text = "a";
  request.record = 3;
  EXPECT_THAT(answer_to(*server_, encode(request), bytes).text, HasSubstr("expected 0 to 2"));
  request.record = UINT32_MAX;
  EXPECT_EQ(answer_to(*server_, encode(request), bytes).kind, Kind::kRefused);
  request.record = 1;
  request.heads = {3, 2, 4};
  EXPECT_THAT(answer_to(*server_, encode(request), bytes).text, HasSubstr("heads 3 to 2 of 4"));
  request.heads = {0, UINT32_MAX, UINT32_MAX};
  EXPECT_EQ(answer_to(*server_, encode(request), bytes).kind, Kind::kRefused);
  EXPECT_EQ(answer_to(*server_, encode(Request{}), bytes).kind, Kind::kRefused) << "a sequence";
  EXPECT_EQ(answer_to(*server_, {1, 2, 3}, bytes).kind, Kind::kRefused);
  request.heads = {};
  EXPECT_EQ(answer_to(*server_, encode(request), bytes).num_parts, 1u);
}

// A server that says of every file what `spoil` makes of an honest answer.
class LyingServer {
 public:
  using Spoil = std::function<void(Answer&, std::vector<uint8_t>&)>;
  explicit LyingServer(Spoil spoil)
      : spoil_(std::move(spoil)), functions_(open_component().value()) {
    kvx_transfer_error error{};
    server_ = functions_->server_create("tcp://127.0.0.1:*", answer, this, &error);
  }
  ~LyingServer() { functions_->server_free(server_); }
  const char* endpoint() const { return functions_->server_endpoint(server_); }

 private:
  static void answer(void* user, const void* bytes, uint64_t count, kvx_transfer_reply reply,
                     void* to) {
    const Request request =
        parse_request({static_cast<const uint8_t*>(bytes), static_cast<size_t>(count)}).value();
    const tier::LayerHead head = head_of("a", {96}, "order x\nrecipe int8\n");
    std::vector<uint8_t> part = tier::encode_layer_head(head);
    if (request.record > 0) {
      const std::vector<uint8_t> page = page_of("a", 0, 96);
      const auto header =
          tier::encode_record_header(head.index.blocks[0].block_copies[0], cache::checksum(page));
      part.assign(header.begin(), header.end());
      part.insert(part.end(), page.begin(), page.end());
    }
    const uint64_t length = part.size();
    std::vector<uint8_t> data(sizeof length);
    std::memcpy(data.data(), &length, sizeof length);
    data.insert(data.end(), part.begin(), part.end());
    Answer answer;
    answer.kind = Kind::kLayers;
    answer.export_id = request.export_id;
    answer.record = request.record;
    answer.num_parts = 1;
    static_cast<LyingServer*>(user)->spoil_(answer, data);
    const std::vector<uint8_t> start = encode(answer);
    reply(to, start.data(), start.size(), data.data(), data.size());
  }
  Spoil spoil_;
  const kvx_transfer_functions_t* functions_;
  kvx_transfer_server* server_;
};

TEST_F(LayerTransfer, BelievesNoSizesAndNoNames) {
  const auto message = [&](LyingServer::Spoil spoil) {
    const LyingServer server(std::move(spoil));
    FetchOptions from = options();
    from.endpoint = server.endpoint();
    const std::vector<std::string> names = {"a"};
    const auto report = fetch_layers(from, names);
    return report.ok() ? report.value().problem : report.error().message;
  };
  const auto of_record = [](uint32_t record, auto spoil) {
    return [=](Answer& answer, std::vector<uint8_t>& data) {
      if (answer.record == record) spoil(answer, data);
    };
  };
  EXPECT_EQ(message([](Answer&, std::vector<uint8_t>&) {}), "");
  for (const uint32_t record : {0u, 1u}) {
    EXPECT_THAT(message(of_record(record, [](Answer&, auto& data) { data[7] = 1; })),
                HasSubstr("cut short"));
    EXPECT_THAT(message(of_record(record, [](Answer&, auto& data) { data.pop_back(); })),
                HasSubstr("cut short"));
    EXPECT_THAT(message(of_record(record, [](Answer&, auto& data) { data.push_back(0); })),
                HasSubstr("1 bytes more"));
    EXPECT_THAT(message(of_record(record, [](Answer& answer, auto&) { answer.num_parts = 9; })),
                HasSubstr("sends 9 parts"));
  }
  EXPECT_THAT(message(of_record(1, [](Answer& answer, auto&) { answer.record = 0; })),
              HasSubstr("parts of record 0"));
  EXPECT_THAT(message(of_record(0, [](Answer&, auto& data) { data[100] ^= 1; })),
              HasSubstr("its index is damaged"));
  EXPECT_THAT(message(of_record(1, [](Answer&, auto& data) { data[20] ^= 1; })),
              HasSubstr("header is damaged"));
  EXPECT_THAT(message(of_record(1, [](Answer&, auto& data) { data[100] ^= 1; })),
              HasSubstr("page of layer 0 is damaged"));
}

}  // namespace
}  // namespace kvx::transfer::layer_transfer_test
