// VectorError: how far one stream of numbers is from another: cosine similarity and relative error.
#pragma once

#include <span>

namespace kvx::quality {

// Both streams are added in parts of any size; the measures are those of the whole.
class VectorError {
 public:
  // reference and other have the same length.
  void add(std::span<const float> reference, std::span<const float> other);
  // The parts of another one's streams.
  void add(const VectorError& part);

  // <r, o> / (|r| |o|); NaN when either is all zero.
  double cosine_similarity() const;
  // |o - r| / |r|; not finite when the reference is all zero.
  double relative_error() const;

 private:
  double product_ = 0;
  double reference_squares_ = 0;
  double other_squares_ = 0;
  double error_squares_ = 0;
};

}  // namespace kvx::quality
