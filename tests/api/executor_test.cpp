// The caller's threads: what runs in them, and what they may do meanwhile.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <thread>

#include "core/executor.hpp"
#include "tests/api/caller_layer.hpp"

namespace kvx::api_test {
namespace {

void run_on_two_threads(void* user, uint32_t num_tasks, void (*task)(void*, uint32_t),
                        void* context) {
  *static_cast<std::atomic<int>*>(user) += static_cast<int>(num_tasks);
  std::thread odd([&] {
    for (uint32_t i = 1; i < num_tasks; i += 2) task(context, i);
  });
  for (uint32_t i = 0; i < num_tasks; i += 2) task(context, i);
  odd.join();
}

TEST(Executor, OfTheCallerRunsTheTasksAndChangesNoBit) {
  constexpr int kMany = 2048;
  const Geometry geometry = {.num_blocks = 256};
  const std::vector<float> k = test_rows(kMany, 2, 32, 0.3f);
  std::vector<int32_t> blocks;
  for (int32_t b = 255; b >= 0; --b) blocks.push_back(b);
  const OneSequence sequence(blocks, kMany);
  PagedLayer alone(geometry, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT4));
  PagedLayer helped(geometry, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT4));
  std::atomic<int> tasks = 0;
  auto executor = sized<kvx_executor_t>();
  executor.num_threads = 2;
  executor.user = &tasks;
  executor.parallel_for = run_on_two_threads;
  const std::vector<int64_t> slots = slots_of(sequence, 8);
  ASSERT_EQ(append_rows(alone.layer, k, k, slots), KVX_STATUS_OK) << kvx_last_error();
  const kvx_rows_t rows = api::rows(k.data(), KVX_DTYPE_F32);
  kvx_append_args_t append = append_args(helped.layer, rows, slots);
  append.executor = &executor;
  ASSERT_EQ(kvx_append(&append, nullptr), KVX_STATUS_OK) << kvx_last_error();
  EXPECT_GT(tasks, 1);
  EXPECT_EQ(helped.memory, alone.memory);

  Attention one(alone.layer, sequence, 1);
  Attention two(helped.layer, sequence, 1);
  two.args.executor = &executor;
  ASSERT_EQ(kvx_attend(&one.args, nullptr), KVX_STATUS_OK);
  ASSERT_EQ(kvx_attend(&two.args, nullptr), KVX_STATUS_OK);
  EXPECT_EQ(one.out, two.out);
  executor.parallel_for = nullptr;
  EXPECT_EQ(kvx_attend(&two.args, nullptr), KVX_STATUS_INVALID_ARGUMENT);
}

TEST(Executor, OfOursGivesOnWhatATaskThrowsAndGoesOn) {
  const auto pool = make_thread_pool(4);
  for (const int fails : {0, 1, 99}) {
    std::atomic<int> ended = 0;
    const auto task = [&](int i) {
      if (i == fails) throw std::runtime_error("no memory");
      ++ended;
    };
    EXPECT_THROW(pool->parallel_for(100, task), std::runtime_error);
    EXPECT_EQ(ended, 99) << "the others run all the same";
    std::atomic<int> all = 0;
    pool->parallel_for(100, [&](int) { ++all; });
    EXPECT_EQ(all, 100);
  }
}

// All verbs over one layer of many tokens and a second one.
class AllVerbs {
 public:
  AllVerbs(int num_tokens, float seed)
      : geometry_{.num_blocks = static_cast<uint32_t>(num_tokens / 8)},
        from_(geometry_, in_page(KVX_FORMAT_INT8), in_page(KVX_FORMAT_INT4)),
        to_(geometry_, in_page(KVX_FORMAT_FP8_E4M3), in_page(KVX_FORMAT_INT8)),
        rows_(test_rows(num_tokens, 2, 32, seed)),
        sequence_(blocks_of(num_tokens / 8), num_tokens),
        slots_(slots_of(sequence_, 8)),
        attention_(to_.layer, sequence_, 1),
        k_(rows_.size()),
        v_(rows_.size()) {}

  // Each verb's status; executor may be null.
  std::vector<kvx_status_t> run(const kvx_executor_t* executor) {
    const kvx_rows_t rows = api::rows(rows_.data(), KVX_DTYPE_F32);
    kvx_append_args_t append = append_args(from_.layer, rows, slots_);
    auto transcode = sized<kvx_transcode_args_t>();
    transcode.from = &from_.layer;
    transcode.to = &to_.layer;
    transcode.slot_dtype = KVX_DTYPE_S64;
    transcode.from_slots = transcode.to_slots = slots_.data();
    transcode.num_tokens = std::ssize(slots_);
    const std::vector<int64_t> first_half = numbers(0, geometry_.num_blocks / 2);
    const std::vector<int64_t> second_half = numbers(geometry_.num_blocks / 2, first_half.size());
    auto copy = sized<kvx_copy_args_t>();
    copy.from = &from_.layer;
    copy.to = &to_.layer;
    copy.from_blocks = first_half.data();
    copy.to_blocks = second_half.data();
    copy.num_copies = static_cast<uint32_t>(first_half.size());
    const kvx_rows_t k = api::rows(k_.data(), KVX_DTYPE_F32);
    const kvx_rows_t v = api::rows(v_.data(), KVX_DTYPE_F32);
    kvx_gather_args_t gather = gather_args(to_.layer, sequence_, k);
    gather.v = &v;
    append.executor = transcode.executor = copy.executor = gather.executor = executor;
    attention_.args.executor = executor;
    attention_.args.q_starts = nullptr;
    return {kvx_append(&append, nullptr), kvx_transcode(&transcode, nullptr),
            kvx_copy_blocks(&copy, nullptr), kvx_gather(&gather, nullptr),
            kvx_attend(&attention_.args, nullptr)};
  }
  bool equals(const AllVerbs& other) const {
    return from_.memory == other.from_.memory && to_.memory == other.to_.memory && k_ == other.k_ &&
           v_ == other.v_ && attention_.out == other.attention_.out;
  }

 private:
  static std::vector<int32_t> blocks_of(int num) {
    std::vector<int32_t> blocks;
    for (int b = num - 1; b >= 0; --b) blocks.push_back(b);
    return blocks;
  }
  static std::vector<int64_t> numbers(int64_t first, size_t count) {
    std::vector<int64_t> numbers(count);
    for (size_t i = 0; i < count; ++i) numbers[i] = first + static_cast<int64_t>(i);
    return numbers;
  }

  Geometry geometry_;
  PagedLayer from_;
  PagedLayer to_;
  std::vector<float> rows_;
  OneSequence sequence_;
  std::vector<int64_t> slots_;
  Attention attention_;
  std::vector<float> k_;
  std::vector<float> v_;
};

// As pools that take other work while they wait: between tasks it calls into the library, in the
// same thread.
struct BusyExecutor {
  explicit BusyExecutor(std::function<void()> between_tasks) : work(std::move(between_tasks)) {
    hook.num_threads = 2;
    hook.user = this;
    hook.parallel_for = [](void* user, uint32_t num_tasks, void (*task)(void*, uint32_t),
                           void* context) {
      auto& self = *static_cast<BusyExecutor*>(user);
      ++self.num_calls;
      for (uint32_t i = 0; i < num_tasks; ++i) {
        if (i < 2) self.work();
        task(context, i);
      }
    };
  }
  std::function<void()> work;
  int num_calls = 0;
  kvx_executor_t hook = sized<kvx_executor_t>();
};

TEST(Executor, MayCallTheLibraryWhileItRunsTasks) {
  const std::vector<kvx_status_t> all_ok(5, KVX_STATUS_OK);
  AllVerbs alone(2048, 0.3f);
  ASSERT_EQ(alone.run(nullptr), all_ok) << kvx_last_error();
  AllVerbs larger(4096, 1.1f);
  AllVerbs smaller(1024, 2.3f);
  BusyExecutor executor([&] {
    EXPECT_EQ(larger.run(nullptr), all_ok) << kvx_last_error();
    EXPECT_EQ(smaller.run(nullptr), all_ok) << kvx_last_error();
  });
  AllVerbs busy(2048, 0.3f);
  ASSERT_EQ(busy.run(&executor.hook), all_ok) << kvx_last_error();
  EXPECT_GE(executor.num_calls, 5) << "not every verb used its executor";
  EXPECT_TRUE(busy.equals(alone));
}

}  // namespace
}  // namespace kvx::api_test
