/* The pixels of a box of a JPEG, without computing those around it.
 *
 * A random crop keeps half of an image on average. libjpeg-turbo can leave out
 * the inverse DCT, the upsampling and the colours of everything else, but has to
 * read the entropy coded stream down to the last row of the box: where a symbol
 * begins, only the one before says. Damage below the box is not seen, and does no
 * harm; a stream that has lost its end is not for us, so that files cut short are
 * found whatever the box.
 *
 * Source: libjpeg-turbo's libjpeg.txt, "Skipping rows when decompressing" and
 * "Decompressing partial scanlines". Built by `jaxscale prepare jpeg`.
 */
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <jpeglib.h>

#ifndef LIBJPEG_TURBO_VERSION
#error "jpeglib.h is not libjpeg-turbo's"
#endif

enum { DONE = 0, DAMAGED = 1, NOT_MINE = 2 };

/* The widest MCU of a JPEG: 4 blocks of 8 pixels (ITU-T T.81, A.2.3). */
enum { WIDEST_MCU = 32, ROWS_AT_ONCE = 16 };

struct errors {
  struct jpeg_error_mgr manager; /* first, so that libjpeg's pointer is ours */
  jmp_buf back;
};

static void give_up(j_common_ptr info) {
  longjmp(((struct errors *)info->err)->back, 1);
}

/* A level below 0 says "corrupt data, continuing with a guess": TurboJPEG calls
 * that a failure, and so do we. Others are traces. */
static void hear(j_common_ptr info, int level) {
  if (level < 0) give_up(info);
}

static void say_nothing(j_common_ptr info) { (void)info; }

/* Read the next rows into consecutive lines of `out`. */
static void read_rows(j_decompress_ptr info, JDIMENSION number, size_t pitch,
                      uint8_t *out) {
  JSAMPROW rows[ROWS_AT_ONCE];
  while (number > 0) {
    JDIMENSION wanted = number < ROWS_AT_ONCE ? number : ROWS_AT_ONCE;
    for (JDIMENSION i = 0; i < wanted; i++) rows[i] = out + i * pitch;
    JDIMENSION got = jpeg_read_scanlines(info, rows, wanted);
    if (got == 0) give_up((j_common_ptr)info); /* else we would ask for ever */
    out += got * pitch;
    number -= got;
  }
}

/* Decode a box of a JPEG.
 *
 * data, size:  the stream.
 * box:         top, left, height, width in pixels; not empty, within the image.
 * channels:    3 for RGB, 1 for grey.
 * out:         [height, width + WIDEST_MCU - 1, channels] bytes. Columns come in
 *              whole MCUs on the left, so the box begins some pixels into a row.
 * first:       set to the number of these pixels.
 *
 * Returns DONE, DAMAGED (an error or a warning; `out` is then worth nothing) or
 * NOT_MINE (CMYK, YCCK, a box outside of the image, or no EOI marker at the end).
 */
int jaxscale_jpeg_box(const uint8_t *data, size_t size, const int32_t *box,
                      int channels, uint8_t *out, int32_t *first) {
  struct jpeg_decompress_struct info;
  struct errors errors;
  JDIMENSION top = box[0], left = box[1], height = box[2], width = box[3];
  size_t pitch = ((size_t)width + WIDEST_MCU - 1) * channels;

  if (size < 2 || data[size - 2] != 0xFF || data[size - 1] != JPEG_EOI) return NOT_MINE;
  info.err = jpeg_std_error(&errors.manager);
  errors.manager.error_exit = give_up;
  errors.manager.emit_message = hear;
  errors.manager.output_message = say_nothing;
  info.mem = NULL; /* nothing to free if creating fails */
  if (setjmp(errors.back)) {
    jpeg_destroy_decompress(&info);
    return DAMAGED;
  }
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, (unsigned char *)data, size);
  jpeg_read_header(&info, TRUE);
  if (info.jpeg_color_space == JCS_CMYK || info.jpeg_color_space == JCS_YCCK ||
      height == 0 || width == 0 || top > info.image_height ||
      height > info.image_height - top || left > info.image_width ||
      width > info.image_width - left) {
    jpeg_destroy_decompress(&info);
    return NOT_MINE;
  }
  info.out_color_space = channels == 3 ? JCS_RGB : JCS_GRAYSCALE;
  info.dct_method = JDCT_IFAST;
  info.do_fancy_upsampling = FALSE; /* so no pixel needs one outside of its MCU */
  jpeg_start_decompress(&info);

  JDIMENSION begin = left;
  jpeg_crop_scanline(&info, &begin, &width);
  *first = (int32_t)(left - begin);
  if (top > 0) jpeg_skip_scanlines(&info, top);
  read_rows(&info, height, pitch, out);
  jpeg_destroy_decompress(&info);
  return DONE;
}
