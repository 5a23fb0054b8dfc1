// SessionNodes: which nodes of a prefix index belong to one session alone. A node is the session's
// whose sequence made it, until a sequence of another session, or of none, finds it: from then on
// it is shared, and nobody's.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvx::cache {

inline constexpr int32_t kNoSession = -1;

// Every call is O(1), on average, but for nodes_of(). Allocates nothing while nobody names a
// session.
class SessionNodes {
 public:
  explicit SessionNodes(int32_t num_nodes) : num_nodes_(num_nodes) {}

  // The session's number, made when it is new; kNoSession for "". A sequence that has one keeps it
  // until leave().
  int32_t join(std::string_view name);
  // A fork's.
  void join(int32_t session);
  void leave(int32_t session);
  // kNoSession: no sequence has it, and it has no node.
  int32_t find(std::string_view name) const;
  int64_t num_sequences(int32_t session) const { return sessions_[session].num_sequences; }

  // A sequence of the session made the node.
  void add(int32_t node, int32_t session);
  // One found it. True: it was another session's until now.
  bool share(int32_t node, int32_t session);
  // The node goes, or is to be nobody's.
  void drop(int32_t node);
  // The name of the session that the node belongs to; "": it is nobody's.
  std::string_view owner(int32_t node) const {
    if (links_.empty() || links_[node].session == kNoSession) return {};
    return sessions_[links_[node].session].name;
  }
  // The session's own, the last made first; none of kNoSession.
  std::vector<int32_t> nodes_of(int32_t session) const;

  // The bytes that the sessions and their nodes take now.
  int64_t metadata_bytes() const;

 private:
  struct Session {
    std::string name;
    int32_t first = -1;  // node
    int64_t num_sequences = 0;
  };
  struct Link {
    int32_t session = kNoSession;
    int32_t previous = -1;
    int32_t next = -1;
  };
  void forget_unused(int32_t session);

  int32_t num_nodes_;
  std::vector<Link> links_;  // [nodes], or none
  std::vector<Session> sessions_;
  std::vector<int32_t> unused_;  // places in sessions_
  std::unordered_map<std::string, int32_t> numbers_;
};

}  // namespace kvx::cache
