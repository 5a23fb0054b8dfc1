// FolderServer: the cache files of a folder, for other processes that know their names
// (file_fetch.hpp). A thread of libkvx_transfer.so answers who asks for them.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transfer/component.h"
#include "transfer/messages.hpp"

namespace kvx::transfer {

struct ServedCounts {
  int64_t num_files = 0;
  int64_t bytes = 0;  // of files; messages add about 100 a file
};

class FolderServer {
 public:
  // Serves FOLDER/NAME.kvx, whenever it is there, to all who ask for NAME. UNSUPPORTED: no
  // libkvx_transfer.so; INVALID_ARGUMENT: an endpoint that cannot be bound.
  static Result<std::unique_ptr<FolderServer>> create(const std::string& endpoint,
                                                      std::string folder);
  ~FolderServer();

  // Where it is bound, with the port that it got.
  const char* endpoint() const { return functions_->server_endpoint(server_); }
  ServedCounts counts() const { return {num_files_, bytes_}; }

 private:
  FolderServer(const kvx_transfer_functions_t* functions, std::string folder)
      : functions_(functions), folder_(std::move(folder)) {}
  // A kvx_transfer_answer: of the server's thread.
  static void answer(void* user, const void* request, uint64_t bytes, kvx_transfer_reply reply,
                     void* to);
  Answer answer_to(const Request& request);

  const kvx_transfer_functions_t* functions_;
  const std::string folder_;
  std::string name_;            // of the file that was read last
  std::vector<uint8_t> whole_;  // its bytes
  std::atomic<int64_t> num_files_ = 0;
  std::atomic<int64_t> bytes_ = 0;
  kvx_transfer_server* server_ = nullptr;  // last: its thread uses all of the above
};

}  // namespace kvx::transfer
