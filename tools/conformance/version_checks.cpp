// Section 3: versions; and the error texts of 1.2.
#include <cstring>
#include <thread>

#include "tools/conformance/check.hpp"
#include "tools/conformance/memory.hpp"

namespace kvx::conformance {
namespace {

// A version struct at the end of readable memory, of which the caller owns `bytes` bytes.
void ask_with_size(const Provider& provider, uint32_t size, int64_t bytes) {
  Memory memory;
  Buffer& buffer = memory.add("version", bytes);
  memcpy(buffer.data(), &size, sizeof size);
  memory.take_picture();
  const kvx_status_t status = provider.get_version(reinterpret_cast<kvx_version_t*>(buffer.data()));
  if (status == KVX_STATUS_OK) memcpy(memory.expect(buffer.data()), buffer.data(), bytes);
  if (const auto difference = memory.first_difference()) {
    fail("kvx_get_version with size {} writes byte {}{}", size, difference->offset,
         status == KVX_STATUS_OK ? "" : " although it fails");
  }
}

void reports_its_version(const Provider& provider) {
  kvx_version_t version{};
  version.size = sizeof version;
  require_status(provider.get_version(&version), KVX_STATUS_OK, "kvx_get_version");
  require(version.abi_major == 1, "abi_major is {}, expected 1", version.abi_major);
  require(version.abi_minor >= 1, "abi_minor is {}, expected at least 1", version.abi_minor);
  require(version.size == sizeof version, "size is {} afterwards, expected {}", version.size,
          sizeof version);
}

void serves_a_caller_of_1_1(const Provider& provider) {
  kvx_version_t version{};
  require_status(provider.get_version(&version), KVX_STATUS_OK, "kvx_get_version with size 0");
  require(version.abi_major == 1 && version.abi_minor >= 1, "the version is {}.{}, expected 1.1",
          version.abi_major, version.abi_minor);
  require(version.size == sizeof version, "size is {} afterwards, expected {}", version.size,
          sizeof version);
}

void writes_no_more_than_the_caller_has(const Provider& provider) {
  for (const uint32_t size : {4u, 8u, 12u}) ask_with_size(provider, size, size);
}

void refuses_null(const Provider& provider) {
  require_status(provider.get_version(nullptr), KVX_STATUS_INVALID_ARGUMENT,
                 "kvx_get_version(null)");
}

void has_words_for_errors(const Provider& provider) {
  require(provider.validate_cache_desc(nullptr) != KVX_STATUS_OK, "a null cache is taken");
  require(provider.last_error() != nullptr && *provider.last_error() != 0,
          "kvx_last_error is empty after a call that failed");
  bool is_empty_elsewhere = false;
  std::thread([&] { is_empty_elsewhere = *provider.last_error() == 0; }).join();
  require(is_empty_elsewhere, "kvx_last_error shows a thread another thread's error");
}

void names_statuses(const Provider& provider) {
  const std::string ok = provider.status_name(KVX_STATUS_OK);
  require(ok == "OK", "kvx_status_name(0) is '{}', expected 'OK'", ok);
  const std::string internal = provider.status_name(KVX_STATUS_INTERNAL_ERROR);
  require(internal == "INTERNAL_ERROR", "kvx_status_name(5) is '{}', expected 'INTERNAL_ERROR'",
          internal);
}

}  // namespace

std::vector<Check> version_checks() {
  return {
      {Section::kVersioning, "version is 1.1 or a later 1", {}, reports_its_version},
      {Section::kVersioning, "version for a caller that sets no size", {}, serves_a_caller_of_1_1},
      {Section::kVersioning,
       "version fits into the caller's size",
       {},
       writes_no_more_than_the_caller_has},
      {Section::kVersioning, "version of null", {}, refuses_null},
      {Section::kWords,
       "last error of a thread",
       {},
       has_words_for_errors,
       false,
       [](const Provider& provider) { return provider.last_error != nullptr; }},
      {Section::kWords,
       "names of statuses",
       {},
       names_statuses,
       false,
       [](const Provider& provider) { return provider.status_name != nullptr; }},
  };
}

}  // namespace kvx::conformance
