// IdLists: ids in one of several doubly linked lists, all in one array; the lists of a policy.
#pragma once

#include <cstdint>
#include <vector>

namespace kvx::cache {

// An id is in one list at most. Every call is O(1).
class IdLists {
 public:
  IdLists(int32_t num_ids, int num_lists)
      : num_ids_(num_ids), links_(static_cast<size_t>(num_ids) + num_lists) {
    for (int32_t id = 0; id < num_ids + num_lists; ++id) links_[id] = {id, id};
  }

  bool is_empty(int list) const { return links_[anchor(list)].next == anchor(list); }
  // Is the id in a list?
  bool contains(int32_t id) const { return links_[id].next != id; }
  // Requires: the list is not empty.
  int32_t front(int list) const { return links_[anchor(list)].next; }

  // Requires: the id is in no list.
  void push_back(int list, int32_t id) { put_between(links_[anchor(list)].previous, id); }
  void push_front(int list, int32_t id) { put_between(anchor(list), id); }
  // Requires: the id is in a list.
  void remove(int32_t id) {
    const Link gone = links_[id];
    links_[gone.previous].next = gone.next;
    links_[gone.next].previous = gone.previous;
    links_[id] = {id, id};
  }

 private:
  struct Link {
    int32_t previous = 0;
    int32_t next = 0;
  };

  // A list is a ring that begins and ends at its anchor; an id in no list is a ring of its own.
  int32_t anchor(int list) const { return num_ids_ + list; }
  void put_between(int32_t previous, int32_t id) {
    const int32_t next = links_[previous].next;
    links_[id] = {previous, next};
    links_[previous].next = id;
    links_[next].previous = id;
  }

  int32_t num_ids_;
  std::vector<Link> links_;
};

}  // namespace kvx::cache
