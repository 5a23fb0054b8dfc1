// FolderServer: a file is read whole for its first part, and its other parts come from memory.
#include "transfer/folder_server.hpp"

#include <algorithm>

#include "tier/whole_file.hpp"
#include "transfer/file_fetch.hpp"
#include "transfer/open_component.hpp"
#include "transfer/peer.hpp"

namespace kvx::transfer {
namespace {

Answer refused(std::string text) {
  Answer answer;
  answer.kind = Kind::kRefused;
  answer.text = std::move(text);
  return answer;
}

}  // namespace

Result<std::unique_ptr<FolderServer>> FolderServer::create(const std::string& endpoint,
                                                           std::string folder) {
  if (endpoint.empty()) {
    return invalid_argument("endpoint is ''; expected tcp://ADDRESS:PORT or ipc://PATH");
  }
  KVX_ASSIGN_OR_RETURN(const kvx_transfer_functions_t* functions, open_component());
  std::unique_ptr<FolderServer> made(new FolderServer(functions, std::move(folder)));
  kvx_transfer_error error{};
  made->server_ = functions->server_create(endpoint.c_str(), answer, made.get(), &error);
  if (made->server_ == nullptr) return invalid_argument("{}", error.text);
  return made;
}

FolderServer::~FolderServer() {
  if (server_ != nullptr) functions_->server_free(server_);
}

void FolderServer::answer(void* user, const void* request, uint64_t bytes, kvx_transfer_reply reply,
                          void* to) {
  const Result<Request> parsed =
      parse_request({static_cast<const uint8_t*>(request), static_cast<size_t>(bytes)});
  const Answer given = parsed.ok() ? static_cast<FolderServer*>(user)->answer_to(parsed.value())
                                   : refused(parsed.error().message);
  const std::vector<uint8_t> head = encode(given);
  reply(to, head.data(), head.size(), given.data.data(), given.data.size());
}

Answer FolderServer::answer_to(const Request& request) {
  if (request.kind != Kind::kFile) {
    return refused("files are on offer here, by their names, and no sequence");
  }
  const Status named = check_file_name(request.text);
  if (!named.ok()) return refused(named.error().message);
  Answer answer;
  answer.kind = Kind::kFile;
  answer.path = request.text;
  if (request.offset == 0 || request.text != name_) {
    name_ = request.text;
    auto read = tier::read_whole_file(folder_ + "/" + name_ + ".kvx", kMostFileBytes);
    if (!read.ok()) {  // it is not there, or not yet
      name_.clear();
      return answer;
    }
    whole_ = std::move(read).value();
    ++num_files_;
  }
  answer.bytes = whole_.size();
  answer.offset = std::min<uint64_t>(request.offset, whole_.size());
  answer.data = std::span<const uint8_t>(whole_).subspan(answer.offset);
  answer.data = answer.data.first(std::min<size_t>(answer.data.size(), kPartBytes));
  bytes_ += std::ssize(answer.data);
  return answer;
}

}  // namespace kvx::transfer
