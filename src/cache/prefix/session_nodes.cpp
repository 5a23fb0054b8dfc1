// SessionNodes: a doubly linked list of nodes a session.
#include "cache/prefix/session_nodes.hpp"

namespace kvx::cache {

int32_t SessionNodes::join(std::string_view name) {
  if (name.empty()) return kNoSession;
  if (links_.empty()) links_.resize(static_cast<size_t>(num_nodes_));
  int32_t session = find(name);
  if (session == kNoSession) {
    if (unused_.empty()) {
      unused_.push_back(static_cast<int32_t>(sessions_.size()));
      sessions_.emplace_back();
    }
    session = unused_.back();
    unused_.pop_back();
    sessions_[session].name = name;
    numbers_.emplace(name, session);
  }
  ++sessions_[session].num_sequences;
  return session;
}

void SessionNodes::join(int32_t session) {
  if (session != kNoSession) ++sessions_[session].num_sequences;
}

void SessionNodes::leave(int32_t session) {
  if (session == kNoSession) return;
  --sessions_[session].num_sequences;
  forget_unused(session);
}

int32_t SessionNodes::find(std::string_view name) const {
  const auto found = numbers_.find(std::string(name));
  return found == numbers_.end() ? kNoSession : found->second;
}

void SessionNodes::add(int32_t node, int32_t session) {
  if (session == kNoSession) return;
  Session& owner = sessions_[session];
  links_[node] = {session, -1, owner.first};
  if (owner.first >= 0) links_[owner.first].previous = node;
  owner.first = node;
}

bool SessionNodes::share(int32_t node, int32_t session) {
  if (links_.empty() || links_[node].session == kNoSession) return false;
  if (links_[node].session == session) return false;
  drop(node);
  return true;
}

void SessionNodes::drop(int32_t node) {
  if (links_.empty() || links_[node].session == kNoSession) return;
  const Link gone = links_[node];
  links_[node] = {};
  if (gone.next >= 0) links_[gone.next].previous = gone.previous;
  if (gone.previous >= 0) {
    links_[gone.previous].next = gone.next;
  } else {
    sessions_[gone.session].first = gone.next;
  }
  forget_unused(gone.session);
}

void SessionNodes::forget_unused(int32_t session) {
  Session& owner = sessions_[session];
  if (owner.num_sequences > 0 || owner.first >= 0) return;
  numbers_.erase(owner.name);
  owner = {};
  unused_.push_back(session);
}

std::vector<int32_t> SessionNodes::nodes_of(int32_t session) const {
  std::vector<int32_t> nodes;
  if (session == kNoSession) return nodes;
  for (int32_t node = sessions_[session].first; node >= 0; node = links_[node].next) {
    nodes.push_back(node);
  }
  return nodes;
}

int64_t SessionNodes::metadata_bytes() const {
  return static_cast<int64_t>(links_.size() * sizeof(Link) + sessions_.size() * sizeof(Session));
}

}  // namespace kvx::cache
