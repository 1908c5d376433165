package workspace

import (
	"errors"
	"syscall"
)

// sentences say what is wrong with a path that the kernel refused.
var sentences = map[syscall.Errno]string{
	syscall.ENOTDIR:      "a part of it is a file, not a directory",
	syscall.EISDIR:       "is a directory",
	syscall.ENAMETOOLONG: "has a name longer than 255 bytes",
	syscall.ELOOP:        "passes too many symbolic links",
	syscall.ENOTEMPTY:    "the directory is not empty",
	syscall.EEXIST:       "is already there",
	syscall.EINVAL:       "cannot be done with this path",
	syscall.EBUSY:        "is in use",
	syscall.ENXIO:        "is no regular file",
	syscall.EPERM:        "is protected",
	syscall.EACCES:       "is protected",
	syscall.EROFS:        "is read-only",
	syscall.EXDEV:        "is on another file system",
	syscall.ETXTBSY:      "is a program that runs",
}

// impossible is the sentence for err, "" when the path is not to blame.
func impossible(err error) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return ""
	}
	return sentences[errno]
}

func full(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EFBIG)
}
