// Files of a folder leave one process and enter another: whole and in order, or an error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <thread>

#include "tier/whole_file.hpp"
#include "transfer/file_fetch.hpp"
#include "transfer/folder_server.hpp"
#include "transfer/open_component.hpp"
#include "transfer/peer.hpp"
#include "transfer/sequence_export.hpp"

namespace kvx::transfer {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

// Two folders, one of them served, both gone with the test.
class FileTransfer : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / fmt::format("kvx-files-{}", getpid());
    fs::create_directories(root_ / "from");
    fs::create_directories(root_ / "to");
    auto made = FolderServer::create("tcp://127.0.0.1:*", (root_ / "from").string());
    ASSERT_TRUE(made.ok()) << made.error().message;
    server_ = std::move(made).value();
  }
  void TearDown() override { fs::remove_all(root_); }

  void put(const std::string& name, size_t bytes) {
    std::vector<uint8_t> content(bytes);
    for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<uint8_t>(i * 31 + name.size());
    const auto path = (root_ / "from" / (name + ".kvx")).string();
    ASSERT_TRUE(tier::write_whole_file(path, content).ok());
  }
  std::vector<uint8_t> read(const std::string& side, const std::string& name) {
    const auto path = (root_ / side / (name + ".kvx")).string();
    auto found = tier::read_whole_file(path, kMostFileBytes);
    return found.ok() ? std::move(found).value() : std::vector<uint8_t>();
  }
  FetchOptions options(int64_t wait_ms = 0) {
    return {server_->endpoint(), (root_ / "to").string(), 10000, wait_ms};
  }

  fs::path root_;
  std::unique_ptr<FolderServer> server_;
};

TEST_F(FileTransfer, BringsFilesOfAnySizeAsTheyAre) {
  const std::vector<size_t> sizes = {
      1, 100, kPartBytes - 1, kPartBytes, kPartBytes + 1, 3 * kPartBytes + 5};
  std::vector<std::string> names;
  int64_t all = 0;
  for (const size_t size : sizes) {
    names.push_back(fmt::format("file-{}", size));
    put(names.back(), size);
    all += static_cast<int64_t>(size);
  }
  const Result<FetchReport> report = fetch_files(options(), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, std::ssize(names));
  EXPECT_EQ(report.value().bytes, all);
  EXPECT_EQ(server_->counts().bytes, all);
  for (const std::string& name : names) EXPECT_EQ(read("to", name), read("from", name)) << name;
}

TEST_F(FileTransfer, EndsAtTheFirstThatIsNotThere) {
  std::vector<std::string> names;
  for (int i = 0; i < 60; ++i) {
    names.push_back(fmt::format("{:02}", i));
    if (i != 23) put(names.back(), 50);
  }
  const Result<FetchReport> report = fetch_files(options(), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, 23);
  EXPECT_EQ(read("to", "22").size(), 50);
  EXPECT_TRUE(read("to", "23").empty());
  EXPECT_TRUE(read("to", "50").empty()) << "nobody asks for it any more";
  EXPECT_EQ(fetch_files(options(), {}).value().num_files, 0);
}

TEST_F(FileTransfer, WaitsForFilesThatAreStillWritten) {
  const std::vector<std::string> names = {"a", "b", "c"};
  put("a", 10);
  std::jthread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    put("b", 20);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    put("c", 30);
  });
  const Result<FetchReport> report = fetch_files(options(10000), names);
  ASSERT_TRUE(report.ok()) << report.error().message;
  EXPECT_EQ(report.value().num_files, 3);
  EXPECT_EQ(read("to", "c"), read("from", "c"));
}

TEST_F(FileTransfer, RefusesCallsThatCannotBe) {
  const auto message = [](const FetchOptions& options, std::string name = "a") {
    const std::vector<std::string> names = {std::move(name)};
    const auto report = fetch_files(options, names);
    return report.ok() ? "" : report.error().message;
  };
  put("a", 10);
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
  EXPECT_EQ(functions->client_receive(client, 5000, take, &bytes, &error), 1);
  functions->client_free(client);
  return parse_answer(bytes).value();
}

TEST_F(FileTransfer, TheServerGivesNothingButFilesOfItsFolder) {
  ASSERT_TRUE(tier::write_whole_file((root_ / "secret.kvx").string(), {}).ok());
  put("a", 10);
  Request request;
  request.kind = Kind::kFile;
  std::vector<uint8_t> bytes;
  for (const char* name : {"../secret", "/etc/passwd", "", "a.kvx", "a/../a"}) {
    request.text = name;
    EXPECT_EQ(answer_to(*server_, encode(request), bytes).kind, Kind::kRefused) << name;
  }
  request.text = "a";
  request.offset = UINT64_MAX;
  EXPECT_EQ(answer_to(*server_, encode(request), bytes).data.size(), 0);
  EXPECT_EQ(answer_to(*server_, encode(Request{}), bytes).kind, Kind::kRefused) << "a sequence";
  EXPECT_EQ(answer_to(*server_, {1, 2, 3}, bytes).kind, Kind::kRefused);
  request.offset = 0;
  EXPECT_EQ(answer_to(*server_, encode(request), bytes).data.size(), 10);
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
    std::vector<uint8_t> data(100, 7);
    Answer answer;
    answer.kind = Kind::kFile;
    answer.path = request.text;
    answer.offset = request.offset;
    answer.bytes = data.size();
    static_cast<LyingServer*>(user)->spoil_(answer, data);
    const std::vector<uint8_t> head = encode(answer);
    reply(to, head.data(), head.size(), data.data(), data.size());
  }
  Spoil spoil_;
  const kvx_transfer_functions_t* functions_;
  kvx_transfer_server* server_;
};

TEST_F(FileTransfer, BelievesNoSizesAndNoNames) {
  const auto message = [&](LyingServer::Spoil spoil) {
    const LyingServer server(std::move(spoil));
    FetchOptions from = options();
    from.endpoint = server.endpoint();
    from.timeout_ms = 1500;
    const std::vector<std::string> names = {"a", "b"};
    const auto report = fetch_files(from, names);
    return report.ok() ? "" : report.error().message;
  };
  EXPECT_EQ(message([](Answer&, std::vector<uint8_t>&) {}), "");
  EXPECT_THAT(message([](Answer& answer, std::vector<uint8_t>&) { answer.bytes = 1ull << 60; }),
              HasSubstr("has 1152921504606846976 bytes"));
  EXPECT_THAT(message([](Answer&, std::vector<uint8_t>& data) { data.pop_back(); }),
              HasSubstr("sends 99 of 100 bytes"));
  EXPECT_THAT(message([](Answer&, std::vector<uint8_t>& data) { data.resize(200); }),
              HasSubstr("sends 200 of 100 bytes"));
}

}  // namespace
}  // namespace kvx::transfer
