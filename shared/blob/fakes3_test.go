package blob

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

func (s *fakeS3) put(w http.ResponseWriter, r *http.Request, key string) {
	body := io.Reader(r.Body)
	if strings.HasPrefix(r.Header.Get("X-Amz-Content-Sha256"), "STREAMING-") {
		body = &awsChunked{r: bufio.NewReader(r.Body)}
	}
	data, err := io.ReadAll(body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	s.objects[key] = data
	w.Header().Set("ETag", `"1"`)
}

func (s *fakeS3) get(w http.ResponseWriter, r *http.Request, key string) {
	data, ok := s.objects[key]
	if !ok {
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(http.StatusNotFound)
		fmt.Fprint(w, `<Error><Code>NoSuchKey</Code><Message>none</Message></Error>`)
		return
	}
	w.Header().Set("ETag", `"1"`)
	w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
	w.Header().Set("Content-Length", strconv.Itoa(len(data)))
	if r.Method == http.MethodGet {
		_, _ = w.Write(data) // a client that left is its own test's failure
	}
}

func (s *fakeS3) list(w http.ResponseWriter, prefix string) {
	var keys []string
	for key := range s.objects {
		if strings.HasPrefix(key, prefix) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	w.Header().Set("Content-Type", "application/xml")
	fmt.Fprint(w, `<ListBucketResult><IsTruncated>false</IsTruncated>`)
	for _, key := range keys {
		fmt.Fprintf(w, `<Contents><Key>%s</Key><Size>%d</Size><LastModified>2006-01-02T15:04:05Z</LastModified><ETag>"1"</ETag></Contents>`, key, len(s.objects[key]))
	}
	fmt.Fprint(w, `</ListBucketResult>`)
}

// awsChunked undoes the aws-chunked encoding: "hex[;ext]\r\n data \r\n" until
// a chunk of zero bytes.
type awsChunked struct {
	r    *bufio.Reader
	left int64
	done bool
}

func (c *awsChunked) Read(p []byte) (int, error) {
	for c.left == 0 {
		if c.done {
			return 0, io.EOF
		}
		line, err := c.r.ReadString('\n')
		if err != nil {
			return 0, err
		}
		size, _, _ := strings.Cut(strings.TrimSpace(line), ";")
		if size == "" { // the end of the chunk before
			continue
		}
		if c.left, err = strconv.ParseInt(size, 16, 64); err != nil {
			return 0, err
		}
		c.done = c.left == 0
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.left)])
	c.left -= int64(n)
	return n, err
}
