sqlite3 c.db 'select count(distinct size) from t' > answer.txt
