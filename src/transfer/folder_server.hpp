// FolderServer: the layer files of a folder (docs/layer-file.md), for other processes that know
// their names (layer_fetch.hpp): a layer can be had while the next one is still computed. A thread
// of libkvx_transfer.so answers who asks for them.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tier/layers/layer_file.hpp"
#include "transfer/component.h"
#include "transfer/messages.hpp"

namespace kvx::transfer {

struct ServedCounts {
  int64_t num_files = 0;  // whose last layer was sent
  int64_t bytes = 0;      // of records and heads; messages add about 50 a dozen files
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
  // Adds a file's record to parts_; false: it is not there (yet).
  Result<bool> add_part(const std::string& name, const Request& request);
  Result<bool> add_record(const std::string& path, const tier::StoredBlockCopy& place,
                          const HeadRange& heads);
  std::string path_of(const std::string& name) const { return folder_ + "/" + name + ".kvx"; }

  const kvx_transfer_functions_t* functions_;
  const std::string folder_;
  // Where a file's pages lie, by its name; of files that were asked for lately.
  std::unordered_map<std::string, std::vector<tier::StoredBlockCopy>> places_;
  std::vector<uint8_t> parts_;  // of the answer that is being made
  std::vector<uint8_t> record_;
  std::atomic<int64_t> num_files_ = 0;
  std::atomic<int64_t> bytes_ = 0;
  kvx_transfer_server* server_ = nullptr;  // last: its thread uses all of the above
};

}  // namespace kvx::transfer
