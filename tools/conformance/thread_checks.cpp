// Section 7.2: calls keep no state, so that several threads may call at the same time.
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

#include "tools/conformance/gather_call.hpp"
#include "tools/conformance/write_call.hpp"

namespace kvx::conformance {
namespace {

// Calls `work(thread)` in several threads that begin together; the first failure is thrown here.
void in_threads(const std::function<void(int)>& work) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 150;
  std::atomic<int> waiting = kThreads;
  std::mutex mutex;
  std::string failure;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (--waiting; waiting > 0;) std::this_thread::yield();
      try {
        for (int round = 0; round < kRounds; ++round) work(thread);
      } catch (const Failed& failed) {
        const std::lock_guard lock(mutex);
        failure = failed.text;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  require(failure.empty(), "with {} threads: {}", kThreads, failure);
}

// Every thread has a geometry of its own, so that another thread's plan would be wrong for it.
Geometry geometry_of(int thread) {
  return {static_cast<uint32_t>(4 + thread), static_cast<uint32_t>(2 + thread),
          static_cast<uint32_t>(1 + thread % 3), 16};
}

void writes_at_the_same_time(const Provider& provider) {
  in_threads([&](int thread) {
    WriteCall(WriteCase{.geometry = geometry_of(thread)}).must_move(provider.write_kv);
  });
}

void gathers_at_the_same_time(const Provider& provider) {
  in_threads([&](int thread) {
    GatherCase gather_case = {.geometry = geometry_of(thread)};
    gather_case.lengths = {thread, 5, 3 + thread};
    GatherCall(gather_case).must_move(provider.gather_kv);
  });
}

// Every thread has a block of one cache.
void shares_a_cache(const Provider& provider) {
  const Geometry geometry = {4, 8, 2, 16};
  WriteCall all(WriteCase{.geometry = geometry, .slots = {0}});
  in_threads([&](int thread) {
    WriteCase write_case = {.geometry = geometry};
    for (int64_t t = 0; t < geometry.block_size; ++t) {
      write_case.slots.push_back(thread * int64_t{geometry.block_size} + t);
    }
    WriteCall own(write_case);
    require_status(provider.write_kv(&all.cache, &own.write, nullptr), KVX_STATUS_OK, "a write");
    GatherCall back(GatherCase{.geometry = geometry, .lengths = {8}});
    back.entries[0] = thread;
    back.store_entries();
    require_status(provider.gather_kv(&all.cache, &back.gather, nullptr), KVX_STATUS_OK,
                   "a gather");
    for (int64_t t = 0; t < geometry.block_size; ++t) {
      for (int64_t h = 0; h < geometry.num_heads; ++h) {
        require(memcmp(io_element(own.write.io.key, t, h, 0),
                       io_element(back.gather.io.key, t, h, 0), geometry.head_dim * 2) == 0,
                "token {} of block {} is not what its thread wrote", t, thread);
      }
    }
  });
}

// The memory of a call becomes inaccessible when it has returned, so that a provider that still
// reads it faults in the next call.
void keeps_no_pointer(const Provider& provider) {
  WriteCall write(WriteCase{});
  write.must_move(provider.write_kv);
  write.memory.close();
  GatherCall gather(GatherCase{});
  gather.must_move(provider.gather_kv);
  gather.memory.close();
  WriteCall(WriteCase{}).must_move(provider.write_kv);
  GatherCall(GatherCase{}).must_move(provider.gather_kv);
}

}  // namespace

std::vector<Check> thread_checks() {
  const Features needs = Features(nhd().needs())
                             .add(needs_of(TableKind::kPacked))
                             .add(kCacheDtypes, KVX_DTYPE_F16)
                             .add(kIoDtypes, KVX_DTYPE_F16);
  return {{Section::kThreads, "write at the same time", needs, writes_at_the_same_time},
          {Section::kThreads, "gather at the same time", needs, gathers_at_the_same_time},
          {Section::kThreads, "share a cache between threads", needs, shares_a_cache},
          {Section::kThreads, "keep no pointer after a call", needs, keeps_no_pointer}};
}

}  // namespace kvx::conformance
