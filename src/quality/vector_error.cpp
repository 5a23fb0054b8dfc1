// VectorError keeps four sums of products in double.
#include "quality/vector_error.hpp"

#include <cmath>
#include <cstddef>

namespace kvx::quality {

void VectorError::add(std::span<const float> reference, std::span<const float> other) {
  for (size_t i = 0; i < reference.size(); ++i) {
    const double r = reference[i];
    const double o = other[i];
    product_ += r * o;
    reference_squares_ += r * r;
    other_squares_ += o * o;
    error_squares_ += (o - r) * (o - r);
  }
}

void VectorError::add(const VectorError& part) {
  product_ += part.product_;
  reference_squares_ += part.reference_squares_;
  other_squares_ += part.other_squares_;
  error_squares_ += part.error_squares_;
}

double VectorError::cosine_similarity() const {
  return product_ / std::sqrt(reference_squares_ * other_squares_);
}

double VectorError::relative_error() const {
  return std::sqrt(error_squares_ / reference_squares_);
}

}  // namespace kvx::quality
