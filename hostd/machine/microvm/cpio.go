package microvm

import (
	"bytes"
	"fmt"
)

// cpioFile is one file of an initramfs.
type cpioFile struct {
	name string
	mode uint32 // permissions
	data []byte
}

// writeCPIO writes an archive in the kernel's "newc" format (kernel,
// Documentation/driver-api/early-userspace/buffer-format.rst).
func writeCPIO(w *bytes.Buffer, files ...cpioFile) {
	for i, f := range files {
		writeEntry(w, i+1, 0o100000|f.mode, f.name, f.data)
	}
	writeEntry(w, 0, 0, "TRAILER!!!", nil)
}

func writeEntry(w *bytes.Buffer, ino int, mode uint32, name string, data []byte) {
	start := w.Len()
	pad := func() { w.Write(make([]byte, -(w.Len()-start)&3)) }
	// ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
	fmt.Fprintf(w, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		ino, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	w.WriteString(name + "\x00")
	pad()
	w.Write(data)
	pad()
}
