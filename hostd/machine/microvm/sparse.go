package microvm

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// blockSize is the unit in which files are compared with nothing, copied,
// hashed and sent: blocks of zeros are holes.
const blockSize = 64 << 10

var zeros [blockSize]byte

func isZero(data []byte) bool { return bytes.Equal(data, zeros[:len(data)]) }

// eachBlock calls f with every block of a file that is not all zeros, by rising
// index; the last may be short. The data is f's until it returns.
func eachBlock(file *os.File, f func(index uint64, data []byte) error) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	size, buf := info.Size(), make([]byte, blockSize)
	for at := int64(0); at < size; {
		data, err := unix.Seek(int(file.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole follows
		}
		if err != nil {
			return fmt.Errorf("seek data: %w", err)
		}
		hole, err := unix.Seek(int(file.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("seek hole: %w", err)
		}
		for at = data &^ (blockSize - 1); at < hole; at += blockSize {
			part := buf[:min(blockSize, size-at)]
			if _, err := file.ReadAt(part, at); err != nil {
				return err
			}
			if isZero(part) {
				continue
			}
			if err := f(uint64(at/blockSize), part); err != nil {
				return err
			}
		}
	}
	return nil
}

// sum is the hash of a file's content, whatever holes it has: SHA-256 over its
// size and every block that is not zeros, with its index.
type sum struct{ h hash.Hash }

func newSum(size int64) sum {
	s := sum{sha256.New()}
	s.number(uint64(size))
	return s
}

func (s sum) number(n uint64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	s.h.Write(b[:])
}

func (s sum) add(index uint64, data []byte) {
	s.number(index)
	s.h.Write(data)
}

func (s sum) String() string { return hex.EncodeToString(s.h.Sum(nil)) }

// part names a file's content.
type part struct {
	Size int64  `json:"size"` // bytes
	Hash string `json:"hash"` // see sum
}

// partOf reads a file.
func partOf(f *os.File) (part, error) {
	info, err := f.Stat()
	if err != nil {
		return part{}, err
	}
	s := newSum(info.Size())
	err = eachBlock(f, func(index uint64, data []byte) error {
		s.add(index, data)
		return nil
	})
	return part{info.Size(), s.String()}, err
}

// copyBlocks makes dst, an empty file, a sparse copy of src and names the
// content.
func copyBlocks(dst, src *os.File) (part, error) {
	info, err := src.Stat()
	if err != nil {
		return part{}, err
	}
	if err := dst.Truncate(info.Size()); err != nil {
		return part{}, err
	}
	s := newSum(info.Size())
	err = eachBlock(src, func(index uint64, data []byte) error {
		s.add(index, data)
		_, err := dst.WriteAt(data, int64(index)*blockSize)
		return err
	})
	return part{info.Size(), s.String()}, err
}

// endOfBlocks follows the last block of a file on the wire.
const endOfBlocks = ^uint64(0)

// sendBlocks writes a file's blocks as (index, data) and an end mark.
func sendBlocks(w io.Writer, f *os.File) error {
	err := eachBlock(f, func(index uint64, data []byte) error {
		if err := binary.Write(w, binary.BigEndian, index); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	})
	if err != nil {
		return err
	}
	return binary.Write(w, binary.BigEndian, endOfBlocks)
}

// receiveBlocks writes what sendBlocks sent into f, an empty file, and refuses
// all that is not want.
func receiveBlocks(f *os.File, r io.Reader, want part) error {
	if err := f.Truncate(want.Size); err != nil {
		return err
	}
	s, buf := newSum(want.Size), make([]byte, blockSize)
	for next := uint64(0); ; {
		var index uint64
		if err := binary.Read(r, binary.BigEndian, &index); err != nil {
			return fmt.Errorf("cut off: %w", err)
		}
		if index == endOfBlocks {
			break
		}
		if index < next || index >= uint64(want.Size+blockSize-1)/blockSize {
			return fmt.Errorf("block %d is out of place", index)
		}
		data := buf[:min(blockSize, want.Size-int64(index)*blockSize)]
		if _, err := io.ReadFull(r, data); err != nil {
			return fmt.Errorf("cut off: %w", err)
		}
		s.add(index, data)
		if _, err := f.WriteAt(data, int64(index)*blockSize); err != nil {
			return err
		}
		next = index + 1
	}
	if got := s.String(); got != want.Hash {
		return fmt.Errorf("content has the hash %.12s, want %.12s", got, want.Hash)
	}
	return nil
}
